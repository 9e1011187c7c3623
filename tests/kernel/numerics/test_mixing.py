"""Batch norm, gains and sums of branches, and a mixed op on the Triton kernels, against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ridgeline.kernel.depthwise import start_places
from ridgeline.search.spaces import load_space
from ridgeline.search.supernet import mixing
from ridgeline.search.supernet.batched import Indices
from ridgeline.search.supernet.draws import packed
from ridgeline.search.supernet.layout import Group
from ridgeline.search.supernet.mixed import MixedOp, weigh
from ridgeline.search.supernet.mixing import Routes, normalise
from ridgeline.search.supernet.network import make_supernet
from tests.kernel.support import check
from tests.support import FULL


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def routes_of(targets: tuple[int, ...], count: int, device: str) -> Routes:
    order = sorted(range(len(targets)), key=lambda branch: targets[branch])
    tensors = (torch.tensor(one, dtype=torch.int32, device=device) for one in (targets, order, start_places(targets, count)))
    return Routes(targets, count, targets == tuple(range(count)) * (len(targets) // count), *tensors)


def results(way: str, y: torch.Tensor, gain: torch.Tensor | None, routes: Routes | None, grad: torch.Tensor) -> list[torch.Tensor]:
    y = y.clone().requires_grad_()
    gain = None if gain is None else gain.clone().requires_grad_()
    out = normalise(y, 3, gain, routes, way)
    out.backward(grad.to(out.dtype))
    found: list[Any] = [out.detach(), y.grad, *([] if gain is None else [gain.grad])]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["whole", "some", "each"])
def test_normalise(kind: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "some" and dtype == torch.float32:
        monkeypatch.setattr(mixing, "TILE", 16)  # a share of the sums for every image
    targets = {"whole": (0, 1, 0, 1), "some": (2, 0, 0, 2), "each": (0, 1, 2, 3)}[kind]
    count = {"whole": 2, "some": 4, "each": 4}[kind]
    routes = None if kind == "each" else routes_of(targets, count, device)
    y = (torch.randn(5, 12, 3, 5, device=device) * 2 + 0.5).to(dtype)
    gain = None if kind == "each" else torch.rand(4, device=device) + 0.2
    grad = torch.randn(5, 3 * count, 3, 5, device=device).to(dtype)
    ours, plain = (results(way, y, gain, routes, grad) for way in ("triton", "torch"))
    exact = results("torch", y.double(), None if gain is None else gain.double(), routes, grad.double())
    for triple in zip(ours, plain, exact, strict=True):
        if triple[0].dtype == torch.float32 and dtype == torch.bfloat16:  # the gain's gradient: ours sums what torch has rounded
            assert torch.allclose(triple[0].double(), triple[2], rtol=1e-2, atol=1e-2)
        else:
            check(*triple)


@pytest.fixture
def filled_with_nan() -> Iterator[None]:
    """Memory nobody wrote to is NaN: what is read of it is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("masked", [False, True])
def test_a_mixed_op_is_the_same_on_both(masked: bool, device: str, filled_with_nan: None) -> None:
    """Families, pools and skips, some edges without some ops; outputs and every gradient. Masked: all ops, those without off by flags."""
    if FULL or device == "cuda":
        group, active = Group((0, 1), (2, 3), (0, 1, 2, 3)), ((1, 3, 5), (0, 2, 4), (3, 4, 5), (1, 2, 3))
    else:
        group, active = Group((0,), (2, 3), (0, 1)), ((1, 2, 3), (0, 3))
    ops = ("none", "max_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_5x5")
    mixed = MixedOp(group, ops, 2, 2, normalise_pools=True, depthwise="triton").to(device)
    x, logits = torch.randn(2, 2 * len(group.sources), 4, 4, device=device), torch.randn(len(active), 6, device=device)
    found = []
    for way, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        mixed = mixed.to(dtype)
        mixed.depthwise = way
        for family in mixed.families:
            family.way = way  # type: ignore[assignment]
        indices = Indices()
        flags = torch.tensor([[float(column in of_edge) for column in range(6)] for of_edge in active], device=device, dtype=dtype)
        flagged = masked and way == "triton"
        plan = mixed.plan([range(6)] * len(active) if flagged else active, indices)
        indices.send(torch.device(device))
        leaves = [x.to(dtype).requires_grad_(), logits.to(dtype).requires_grad_(), *mixed.parameters()]
        shares = leaves[1].softmax(-1)
        out = mixed(leaves[0], weigh(plan, shares * flags, None, flags) if flagged else weigh(plan, shares, None))
        gradients = torch.autograd.grad(out.square().sum() + out[:, 0].sum() * 0.1, leaves, allow_unused=True)
        found.append([out.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True))])
    for ours, exact in zip(*found, strict=True):
        assert float((ours.double() - exact).norm() / exact.norm().clamp_min(1e-6)) < 1e-3
        if exact.dim() > 2 and masked:
            assert not ours[(exact == 0).flatten(1).all(1)].any()  # gradients of what is off: exactly zero


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("name", ["darts", "nb201"])
def test_a_masked_supernet_is_the_drawn_path(name: str, device: str, filled_with_nan: None) -> None:
    """Ops that were not drawn, skipped by flags on the device: the loss and every gradient, those of undrawn weights exactly zero."""
    if device == "cpu" and not FULL:
        pytest.skip("a minute and a half interpreted; RIDGELINE_FULL=1 runs it")
    space = load_space(name, channels=2, cells=3 if name == "darts" else 1, image=4)
    supernet = make_supernet(space, policy="sample", depthwise="triton").to(device)
    draw, parameters = supernet.sample(), list(supernet.parameters())
    x, y = torch.randn(3, 3, 4, 4, device=device), torch.tensor([1, 2, 3], device=device)
    found = []
    for drawn in (packed([draw], supernet.architecture.weights)[0].to(device), draw):
        loss = torch.nn.functional.cross_entropy(supernet(x, drawn), y)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append([loss.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True))])
    for ours, path in zip(*found, strict=True):
        assert float((ours - path).norm() / path.norm().clamp_min(1e-3)) < 1e-3
        if path.dim() > 2:
            assert not ours[(path == 0).flatten(1).all(1)].any()
