"""The two oneDNN operators against their plain formula, in every layout, packed and not; packed weights follow the plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from ridgeline.transform.graph import onednn
from ridgeline.transform.graph.onednn_time import Layer, Timing, timing

pytestmark = pytest.mark.skipif(not onednn.available(), reason="torch was built without oneDNN")
NUMBERS = {"hardtanh": [-0.5, 1.5], "leaky_relu": [0.1]}
LAST = torch.channels_last


def conv_case(activation: str, *, other: bool, groups: int = 1, dtype: torch.dtype = torch.float32) -> list[object]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 8, 9, 7), torch.randn(16, 8 // groups, 3, 3) / 5, torch.randn(16)
    beside = torch.randn(2, 16, 5, 4) if other else None
    tensors = [None if one is None else one.to(dtype) for one in (x, weight, bias, beside)]
    return [*tensors, [2, 2], [1, 1], [1, 1], groups, activation, NUMBERS.get(activation, [])]


def within(found: Tensor, formula: Tensor, exact: Tensor) -> bool:
    """The 2x rule: no further from float64 than twice the plain formula is."""
    scale = exact.abs().max()
    ours, plain = ((one.double() - exact).abs().max() / scale for one in (found, formula))
    return bool(ours <= 2 * plain + 2 * torch.finfo(found.dtype).eps)


def wide(args: list[object]) -> list[object]:
    return [one.double() if isinstance(one, Tensor) else one for one in args]


@pytest.mark.parametrize("activation", onednn.ACTIVATIONS)
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_conv_is_its_formula(activation: str, other: bool, packed: bool) -> None:
    for groups in (1, 8):
        args = conv_case(activation, other=other, groups=groups)
        plain, exact = onednn.conv_formula(*args, packed), onednn.conv_formula(*wide(args), packed)
        for x in (args[0], args[0].contiguous(memory_format=LAST)):
            found = onednn.conv(x, *args[1:], packed)
            assert within(found, plain, exact)
            assert not within(found * 1.01, plain, exact)
            assert not packed or found.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("activation", onednn.ACTIVATIONS)
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_linear_is_its_formula(activation: str, other: bool, packed: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 24), torch.randn(7, 24) / 5, torch.randn(7)
    args = [x, weight, bias, torch.randn(3, 5, 7) if other else None, activation, NUMBERS.get(activation, []), packed]
    plain, exact = onednn.linear_formula(*args), onednn.linear_formula(*wide(args))
    for one in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        found = onednn.linear(one, *args[1:])
        assert within(found, plain, exact) and found.is_contiguous()
        assert not within(found * 1.01, plain, exact)


@pytest.mark.parametrize("packed", [False, True])
def test_torch_can_trace_them(packed: bool) -> None:
    opcheck(onednn.conv, (*conv_case("relu", other=True), packed))
    opcheck(onednn.conv, (*conv_case("gelu", other=False, groups=8), packed))
    opcheck(onednn.linear, (torch.randn(2, 3, 8), torch.randn(4, 8), None, torch.randn(2, 3, 4), "none", [], packed))


def test_dtypes_onednn_does_not_know_use_the_formula() -> None:
    args = conv_case("silu", other=True, dtype=torch.float64)
    assert torch.equal(onednn.conv(*args, True), onednn.conv_formula(*args, True))
    assert onednn.conv(*args, True).is_contiguous(memory_format=LAST)


def test_a_packed_weight_follows_the_plain_one() -> None:
    x, weight = torch.randn(4, 8), torch.nn.Parameter(torch.randn(4, 8), requires_grad=False)

    def right() -> bool:
        return torch.allclose(onednn.linear(x, weight, None, None, "none", [], True), x @ weight.t(), atol=1e-5)

    assert right()
    weight.mul_(2)
    assert right()
    weight.data = torch.randn(4, 8)
    assert right()
    twin = copy.deepcopy(weight)
    twin.zero_()
    assert not onednn.linear(x, twin, None, None, "none", [], True).any() and right()


def test_one_weight_packed_for_two_uses_is_packed_twice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    once = onednn._once
    monkeypatch.setattr(onednn, "_once", lambda weight, use, pack: once(weight, use, lambda plain: (times.append(1), pack(plain))[1]))
    x, weight = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    for _ in range(3):
        for stride in (1, 2):
            onednn.conv(x, weight, None, None, [stride] * 2, [1, 1], [1, 1], 1, "none", [], True)
    assert len(times) == 2


def test_a_packed_weight_dies_with_the_plain_one() -> None:
    known = len(onednn._packed)
    weight = torch.randn(4, 8)
    onednn.linear(torch.randn(2, 8), weight, None, None, "none", [], True)
    assert len(onednn._packed) == known + 1
    del weight
    assert len(onednn._packed) <= known


def test_timing_is_remembered_and_decides() -> None:
    layer = Layer((1, 8, 6, 6), (8, 8, 3, 3), torch.float32, ((1, 1), (1, 1), (1, 1), 1), other=True, activation="relu")
    assert timing(layer) is timing(layer) and timing(layer).plain_s > 0
    assert Timing(1e-3, 1e-3).pays and not Timing(1e-3, 2e-3).pays
