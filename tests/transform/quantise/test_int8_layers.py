"""Layers in integers against an int64 loop: the same codes, the same sums, the same floats; kernel and fallback agree bit by bit."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.measure.memory import StorageTracker
from ridgeline.transform.kinds import build, describe
from ridgeline.transform.quantise import int8_layers
from ridgeline.transform.quantise.grid import Grid, quantise
from ridgeline.transform.quantise.int8_layers import (
    Activation,
    Int8Conv2d,
    Int8Layer,
    Int8Linear,
    activation_codes,
    int_mm_works,
    integer_product,
    onednn_works,
)
from tests.support import full_or_tenth

kernels = pytest.mark.skipif(not onednn_works(), reason="torch has no integer kernels on this CPU")


def layer_of(module: nn.Module, bits: int = 8, entry: Activation | None = None, **link: bool) -> Int8Layer:
    quantised = quantise(module.weight.detach(), Grid(bits))  # type: ignore[arg-type]
    entry = entry or Activation(0.03125, 100)
    if isinstance(module, nn.Conv2d):
        return Int8Conv2d.from_quantised(quantised, module, module.bias, entry)
    return Int8Linear.from_quantised(quantised, module.bias, entry)  # type: ignore[arg-type]


def follow(layer: Int8Layer, scale: float, zero: int, relu: bool) -> Int8Layer:
    """The layer linked to one whose input grid is this."""
    layer.link_to(layer_of(nn.Linear(2, 2), entry=Activation(scale, zero)), relu=relu)
    return layer


def reference(layer: Int8Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """(sums int64, exact outputs float64) by integer products of unfolded patches."""
    entry = layer.entry
    codes = torch.clamp(torch.round(x / torch.tensor(entry.scale)) + entry.zero, 0, 255).long() - entry.zero
    weight = layer.integers().long()
    if isinstance(layer, Int8Conv2d):
        sums = integer_conv(codes, weight, layer)
        shape = (1, -1, 1, 1)
    else:
        sums, shape = codes.reshape(-1, x.shape[-1]) @ weight.t(), (1, -1)
    bias = torch.zeros(1) if layer.bias is None else layer.bias
    return sums, sums.double() * entry.scale * layer.scale.double().view(shape) + bias.double().view(shape)


def integer_conv(codes: Tensor, weight: Tensor, layer: Int8Conv2d) -> Tensor:
    """A convolution as loops over kernel positions and groups, int64."""
    padded = functional.pad(codes, (layer.padding[1],) * 2 + (layer.padding[0],) * 2)
    height, width = ((padded.shape[2 + i] - layer.dilation[i] * (weight.shape[2 + i] - 1) - 1) // layer.stride[i] + 1 for i in (0, 1))
    out = torch.zeros(len(codes), len(weight), height, width, dtype=torch.int64)
    outs, ins = len(weight) // layer.groups, weight.shape[1]
    for group in range(layer.groups):
        for i in range(weight.shape[2]):
            for j in range(weight.shape[3]):
                top, left = i * layer.dilation[0], j * layer.dilation[1]
                patch = padded[:, group * ins : (group + 1) * ins, top : top + (height - 1) * layer.stride[0] + 1 : layer.stride[0],
                               left : left + (width - 1) * layer.stride[1] + 1 : layer.stride[1]]  # fmt: skip
                part = torch.einsum("nihw,oi->nohw", patch, weight[group * outs : (group + 1) * outs, :, i, j])
                out[:, group * outs : (group + 1) * outs] += part
    return out


CONVS = [
    dict(in_channels=16, out_channels=8, kernel_size=3, padding=1),
    dict(in_channels=3, out_channels=16, kernel_size=3, padding=1, stride=2, bias=False),
    dict(in_channels=8, out_channels=8, kernel_size=3, padding=2, dilation=2, groups=4),
    dict(in_channels=4, out_channels=4, kernel_size=(1, 5), padding="same", groups=4),
    dict(in_channels=5, out_channels=7, kernel_size=1, padding="valid"),
]


@pytest.mark.parametrize("shape", CONVS)
@pytest.mark.parametrize("kernel", [pytest.param(True, marks=kernels), False])
@pytest.mark.parametrize("bits", [8, 3])
def test_convolution_equals_the_integer_loop(shape: dict, kernel: bool, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(int8_layers, "onednn_works", lambda: kernel)
    layer = layer_of(nn.Conv2d(**shape), bits)
    x = torch.randn(2, shape["in_channels"], 9, 8)
    sums, exact = reference(layer, x)
    out = layer(x)
    order = (sums.float() * layer.entry.scale) * layer.scale.view(1, -1, 1, 1)
    assert torch.equal(out, order if layer.bias is None else order + layer.bias.view(1, -1, 1, 1))
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=kernels), False])
@pytest.mark.parametrize("rows", [(1,), (3, 5), (40,)])
def test_linear_equals_the_integer_product(kernel: bool, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(int8_layers, "onednn_works", lambda: kernel)
    layer = layer_of(nn.Linear(24, 16), 8)
    x = torch.randn(*rows, 24)
    sums, exact = reference(layer, x)
    assert torch.equal(layer(x).reshape(-1, 16), (sums.float() * layer.entry.scale) * layer.scale.view(1, -1) + layer.bias)
    torch.testing.assert_close(layer(x).reshape(-1, 16).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=kernels), False])
@pytest.mark.parametrize("relu", [True, False])
def test_codes_handed_on_are_the_exact_rounding(kernel: bool, relu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(int8_layers, "onednn_works", lambda: kernel)
    layer = follow(layer_of(nn.Conv2d(8, 8, 3, padding=1)), 0.021, 0 if relu else 90, relu)
    x = torch.randn(4, 8, 9, 9)
    _, exact = reference(layer, x)
    exact = (exact.relu() if relu else exact) / layer.exit.scale + layer.exit.zero  # type: ignore[union-attr]
    codes = layer(x)
    assert codes.dtype is torch.uint8
    # half a step off at most, but for sums whose float32 scaling falls on the other side of a half
    assert ((codes.double() - exact.clamp(0, 255)).abs() <= 0.5 + 1e-4).all()
    assert (codes.double() != exact.clamp(0, 255).round()).double().mean() < 1e-3


@kernels
def test_kernel_and_fallback_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    layers = [follow(layer_of(nn.Conv2d(16, 16, 3, padding=1), bits), 0.02, 5, True) for bits in (8, 4)]
    layers += [follow(layer_of(nn.Linear(32, 24)), 0.02, 5, True)]
    inputs = [torch.randn(8, 16, 12, 12), torch.randn(8, 16, 12, 12), torch.randn(50, 32)]
    fast = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    monkeypatch.setattr(int8_layers, "onednn_works", lambda: False)
    slow = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))


@given(
    st.floats(2.0**-20, 2.0**20, width=32), st.integers(0, 255), st.lists(st.floats(-(2.0**30), 2.0**30, width=32), min_size=1, max_size=64)
)
@settings(max_examples=full_or_tenth(500), deadline=None)
def test_activation_codes_follow_the_rule(scale: float, zero: int, values: list[float]) -> None:
    x = torch.tensor(values)
    want = torch.clamp(torch.round(x / torch.tensor(scale)) + zero, 0, 255)
    assert torch.equal(activation_codes(x, scale, zero).float(), want)


def test_codes_round_half_to_even_and_keep_the_layout() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0])
    assert activation_codes(x, 1.0, 10).tolist() == [10, 12, 12, 10, 8, 255, 0]
    image = torch.randn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert activation_codes(image, 0.1, 3).is_contiguous(memory_format=torch.channels_last)


def test_uint8_is_taken_for_codes_only_where_linked() -> None:
    layer = layer_of(nn.Linear(4, 2), entry=Activation(1.0, 0))
    x = torch.tensor([[3, 1, 4, 1]], dtype=torch.uint8)
    plain = layer(x)
    layer.input_zero.fill_(7)
    layer._forget()
    shifted = layer(x)
    torch.testing.assert_close(plain, shifted)  # values: the zero point does not change them
    layer.takes_codes = True
    assert not torch.allclose(layer(x), plain)


def test_a_planted_scale_error_is_seen() -> None:
    torch.manual_seed(4)
    layer = layer_of(nn.Linear(32, 8))
    x = torch.randn(16, 32)
    _, exact = reference(layer, x)
    layer.scale *= 1.01
    layer._forget()
    assert (layer(x).double() - exact).norm() / exact.norm() > 5e-3


@pytest.mark.parametrize("module", [nn.Conv2d(4, 6, 3, padding=1), nn.Linear(10, 6, bias=False)])
@pytest.mark.parametrize("linked", [False, True])
def test_state_dict_and_config_are_the_whole_layer(module: nn.Module, linked: bool) -> None:
    layer = layer_of(module, 5)
    if linked:
        follow(layer, 0.1, 3, True)
        layer.takes_codes = True
    x = torch.randn(2, 4, 6, 6) if isinstance(module, nn.Conv2d) else torch.randn(7, 10)
    twin = build(json.loads(json.dumps(describe(layer))))
    twin.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(twin(x), layer(x))
    assert all(tensor.dtype in (torch.uint8, torch.float32) for tensor in layer.state_dict().values())
    assert layer.logical_parameters() == sum(p.numel() for p in module.parameters())


def test_bytes_are_those_of_the_bits() -> None:
    for bits in range(2, 9):
        layer = layer_of(nn.Conv2d(16, 8, 3), bits)
        assert layer.packed.nbytes == 8 * (16 * 9 * bits // 8)
        assert layer.packed_bytes() == layer.packed.nbytes + 8 * 4


def test_copies_casts_and_loads_forget_the_kernel_layout() -> None:
    layer = layer_of(nn.Linear(16, 8))
    x = torch.randn(3, 16)
    before = layer(x)
    twin = copy.deepcopy(layer)
    assert not twin._prepared and torch.equal(twin(x), before)
    assert torch.equal(twin.half()(x), before)  # scales are never rounded
    other = layer_of(nn.Linear(16, 8))
    wanted = other(x)
    twin.load_state_dict(other.state_dict())
    assert torch.equal(twin(x), wanted) and not torch.equal(wanted, before)


def test_narrow_floats_come_back_in_their_own_type() -> None:
    layer = layer_of(nn.Linear(16, 8))
    assert layer(torch.randn(3, 16).bfloat16()).dtype is torch.bfloat16


@kernels
def test_a_dispatch_mode_can_watch() -> None:
    layer = layer_of(nn.Conv2d(4, 4, 3))
    x = torch.randn(1, 4, 8, 8)
    wanted = layer(x)
    with StorageTracker() as tracker:
        out = layer(x)
    assert torch.equal(out, wanted) and tracker.peak_bytes >= out.nbytes


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("kernel", [True, False])
def test_integer_product_is_exact(rows: int, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_layers, "int_mm_works", lambda: kernel and int_mm_works())
    made = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-128, 128, (size, 24), dtype=torch.int8, generator=made) for size in (rows, 16))
    assert torch.equal(integer_product(a, b).long(), a.long() @ b.long().t())


def test_where_integers_run_is_said() -> None:
    layer = layer_of(nn.Conv2d(4, 4, 3))
    runs, reason = layer.runs_packed("cuda")
    assert not runs and "float64" in reason
    assert layer_of(nn.Linear(16, 8)).runs_packed("cuda")[0]
    assert not layer_of(nn.Linear(15, 8)).runs_packed("cuda")[0]
    assert layer.runs_packed("cpu")[0] == onednn_works()
