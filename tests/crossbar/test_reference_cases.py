"""The reference against stored results of another simulator (MemIntelli, float64), case by case.

    <case>.npz: x, w, cfg, out64, digits, scales, dequantised operands, gradients; G and V where there is noise
      ──chip_of_case──> chip ──reference──> the same arrays, exact; out64 to 1e-12 of its maximum where no conversion is tied

A conversion exactly between two codes was decided there by float noise: each allows its output one ADC step of its slice pair.
RIDGELINE_CROSSBAR_CASES names another folder of such files.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.crossbar.engine import reference
from ridgeline.target.crossbar import CrossbarSpec
from tests.crossbar.support import chip_of_case

OWN = Path(__file__).parent / "cases"
FOLDER = Path(os.environ.get("RIDGELINE_CROSSBAR_CASES") or OWN)
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
TOLERANCE = 1e-12
Case = tuple[dict[str, Any], dict[str, Tensor]]


@cache
def load(name: str, folder: Path = FOLDER) -> Case:
    with numpy.load(folder / f"{name}.npz", allow_pickle=False) as stored:
        arrays = {key: torch.from_numpy(stored[key]) for key in stored.files if key != "cfg"}
        return json.loads(str(stored["cfg"])), arrays


def most_significant_first(arrays: dict[str, Tensor], key: str) -> Tensor | None:
    return arrays[key].flip(-3) if key in arrays else None


def as_matmul(cfg: dict[str, Any], arrays: dict[str, Tensor], on: CrossbarSpec) -> reference.Analog:
    """Any case as the matmul it is, without bias: (…, M, K) times (K, N)."""
    x, w = arrays["x"], arrays["w"]
    if cfg["kind"] == "conv2d":
        window = {"kernel_size": tuple(w.shape[2:]), "stride": cfg["stride"], "padding": cfg["padding"], "dilation": cfg["dilation"]}
        x, w = functional.unfold(x, **window).transpose(1, 2), w.flatten(1).T
    elif cfg["kind"] == "linear":
        w = w.T
    given = {"conductance": most_significant_first(arrays, "G"), "voltage": most_significant_first(arrays, "V")}
    return reference.matmul(x, w, on, **given)


def as_layer(cfg: dict[str, Any], arrays: dict[str, Tensor], on: CrossbarSpec, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of a linear or convolution case, and its gradients for the output gradient linspace(-1, 1)."""
    given = {key: arrays[key].clone().requires_grad_() for key in ("x", "w", "b") if key in arrays}
    if cfg["kind"] == "conv2d":
        options |= {key: cfg[key] for key in ("stride", "padding", "dilation")}
        out = reference.conv2d(given["x"], given["w"], on, given.get("b"), **options)
    else:
        out = reference.linear(given["x"], given["w"], on, given.get("b"))
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape))
    return out.detach(), {f"grad_{key}": tensor.grad for key, tensor in given.items() if tensor.grad is not None}


def tied(codes_before_rounding: Tensor) -> Tensor:
    return (codes_before_rounding % 1 - 0.5).abs() < 1e-8  # a conversion that is not tied lies at least 1 / (2 * full) away from a half


def allowance(analog: reference.Analog, arrays: dict[str, Tensor], cfg: dict[str, Any]) -> tuple[Tensor, float]:
    """How far each output (…, M, N) may be off: one step for each tie; and the share of conversions that are ties. Plain einsum."""
    rows, g_span = cfg["wp"][0], cfg["g_level"] - 1
    most_x, most_w = (torch.tensor([2.0**width - 1 for width in cfg[key]], dtype=torch.float64)[:, None, None] for key in ("xs", "ws"))
    v, g = most_significant_first(arrays, "V"), most_significant_first(arrays, "G")
    x = torch.round(analog.x_digits / most_x * (cfg["rdac"] - 1)) / (cfg["rdac"] - 1) if v is None else v / cfg["vread"]
    w = torch.round(analog.w_digits / most_w * g_span) / g_span if g is None else (g - cfg["LGS"]) / (cfg["HGS"] - cfg["LGS"])
    radc = torch.tensor(cfg["radc"], dtype=torch.float64).expand(len(cfg["ws"]))
    before = torch.einsum("...akimr,kbjrn->...kijamnb", x, w) / rows * (radc - 1)[:, None, None, None, None]
    ties = tied(before)
    # One step of a slice pair is rows * (largest digit * weight of each) / (radc - 1), times the two block steps.
    worth_x, worth_w = (_worth(cfg[key]) for key in ("xs", "ws"))
    pair = worth_x[:, None] * (worth_w / (radc - 1))[None, :] * rows
    per_array = torch.einsum("...kijamnb,ij->...kamnb", ties.double(), pair)
    total = torch.einsum("...kamnb,...ak,kb->...ambn", per_array, _step(analog.x_scale, cfg, "xs"), _step(analog.w_scale, cfg, "ws"))
    whole = total.flatten(-2).flatten(-3, -2)[..., : analog.out.shape[-2], : analog.out.shape[-1]]
    return whole, float(ties.double().mean())


def _worth(widths: list[int]) -> Tensor:
    return torch.tensor([(2**width - 1) * 2 ** sum(widths[i + 1 :]) for i, width in enumerate(widths)], dtype=torch.float64)


def _step(scale: Tensor, cfg: dict[str, Any], key: str) -> Tensor:
    bits = sum(cfg[key])
    return torch.exp2(scale + 2 - bits) if cfg["bw_e"] else scale / (2 ** (bits - 1) - 1)


@cache
def solved(name: str, folder: Path = FOLDER) -> tuple[reference.Analog, Tensor, float]:
    """A case computed on its own chip, with its allowance and its share of ties."""
    cfg, arrays = load(name, folder)
    analog = as_matmul(cfg, arrays, chip_of_case(cfg))
    return analog, *allowance(analog, arrays, cfg)


def outputs_off(out: Tensor, allowed: Tensor, cfg: dict[str, Any], arrays: dict[str, Tensor]) -> float:
    """The largest excess over what is allowed, relative to the largest output; <= 0 is right."""
    stored = (
        arrays["out64"] - (arrays["b"][:, None, None] if arrays["out64"].dim() == 4 else arrays["b"]) if "b" in arrays else arrays["out64"]
    )
    if cfg["kind"] == "conv2d":
        stored = stored.flatten(2).transpose(1, 2)
    largest = arrays["out64"].abs().max()
    excess = (out - stored).abs() - allowed * (1 + 1e-9) - TOLERANCE * largest
    return float(excess.max() / largest)


def relative(found: Tensor, stored: Tensor) -> float:
    return float((found - stored).abs().max() / stored.abs().max())


def test_there_are_cases() -> None:
    assert NAMES, f"no cases in {FOLDER}"
    assert len(list(OWN.glob("*.npz"))) == 33


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    cfg, arrays = load(name)
    analog, allowed, _ = solved(name)
    assert outputs_off(analog.out, allowed, cfg, arrays) <= 0
    found = {"x_slices": analog.x_digits.flip(-3), "w_slices": analog.w_digits.flip(-3), "xq": analog.xq, "wq": analog.wq}
    found |= {"x_scale": analog.x_scale[..., None, None], "w_scale": analog.w_scale[..., None, None]}
    for key in found.keys() & arrays.keys():
        assert found[key].shape == arrays[key].shape, key
        assert bool((found[key] == arrays[key]).all()), key


@pytest.mark.parametrize("name", [name for name in NAMES if load(name)[0]["kind"] != "matmul"])
def test_layer_and_gradients(name: str) -> None:
    cfg, arrays = load(name)
    options = {"weight_gradient": "image"} if cfg["kind"] == "conv2d" else {}
    out, gradients = as_layer(cfg, arrays, chip_of_case(cfg), **options)
    analog = solved(name)[0]
    plain = analog.out.transpose(1, 2).reshape(out.shape) if cfg["kind"] == "conv2d" else analog.out
    if "b" in arrays:
        plain = plain + (arrays["b"][:, None, None] if out.dim() == 4 else arrays["b"])
    assert torch.equal(out, plain)
    for key, gradient in gradients.items():
        if key in arrays:
            assert relative(gradient, arrays[key]) <= TOLERANCE, key


def test_own_cases_hold_ties_as_they_say() -> None:
    """Levels of 2^n + 1 never tie; with 2^n a small share does, so that the allowance is not a way out."""
    names = [path.stem for path in sorted(OWN.glob("*.npz"))]
    shares = [(load(name, OWN)[0]["radc"], solved(name, OWN)[2]) for name in names]
    assert all(share == 0 for radc, share in shares if radc % 2)
    assert all(share < 0.011 for _, share in shares)
    assert sum(share > 0 for _, share in shares) == 7


@pytest.mark.parametrize(
    "planted", [{"radc": 4098}, {"radc": 4096}, {"rdac": 5}, {"xg": [1, 128]}, {"wg": [64, 32]}, {"bw_e": 8}, {"g_level": 5}]
)
def test_planted_wrong_chip_is_caught(planted: dict[str, Any]) -> None:
    cfg, arrays = load("int_1122_radc4097", OWN)
    _, allowed, _ = solved("int_1122_radc4097", OWN)
    wrong = as_matmul(cfg, arrays, chip_of_case(cfg | planted))
    assert outputs_off(wrong.out, allowed, cfg, arrays) > 1e-6


def test_planted_step_is_caught_beside_ties() -> None:
    """One code one too high, in an output without a tied conversion, of a case that has ties."""
    cfg, arrays = load("int_1122_radc4096", OWN)
    analog, allowed, _ = solved("int_1122_radc4096", OWN)
    smallest_step = float(analog.x_scale.min() * analog.w_scale.min()) / 31 / 31 * 32 / 4095
    planted = torch.where(allowed == 0, smallest_step, 0.0)
    assert bool(planted.any())
    assert outputs_off(analog.out + planted, allowed, cfg, arrays) > 0


def test_planted_gradient_per_patch_is_caught() -> None:
    """The stored gradients average a pixel's patches: half a per cent away from the gradient of what was computed."""
    cfg, arrays = load("conv3_s1p1", OWN)
    per_patch = as_layer(cfg, arrays, chip_of_case(cfg), weight_gradient="patch")[1]
    assert 1e-3 < relative(per_patch["grad_w"], arrays["grad_w"]) < 1e-2
    assert relative(per_patch["grad_x"], arrays["grad_x"]) <= TOLERANCE
