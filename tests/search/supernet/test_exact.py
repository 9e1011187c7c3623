"""The batched supernet is the plain one: loss and every gradient in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import RidgelineError
from ridgeline.search.spaces import load_space
from ridgeline.search.spaces.ops import _OPS, register_op
from ridgeline.search.supernet.network import Supernet, make_supernet
from ridgeline.search.supernet.plain import PlainSupernet, pairs, plain_of
from tests.support import FULL

SMALL = {"darts": {"channels": 8, "cells": 3, "image": 8}, "nb201": {"channels": 8, "cells": 1, "image": 8}}


def made(name: str, **options: Any) -> Supernet:
    settings = dict(SMALL[name], **options.pop("settings", {}))
    supernet = make_supernet(load_space(name, **settings), **options).double()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in supernet.architecture_parameters():
            parameter.copy_(torch.randn_like(parameter))
    return supernet


def batch(count: int = 4, size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=random).double(), torch.arange(count) % 10


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    net.zero_grad()
    loss = functional.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


def close(first: Tensor | None, second: Tensor | None, most: float) -> bool:
    assert first is not None and second is not None
    return float((first - second).abs().max()) <= most * max(1.0, float(second.abs().max()))


def compare(plain: PlainSupernet, supernet: Supernet, x: Tensor, y: Tensor) -> None:
    first, second = loss_of(plain, x, y), loss_of(supernet, x, y)
    assert abs(float(first - second)) <= 1e-12
    for name, parameter in plain.architecture.named_parameters():
        gradient = supernet.architecture.get_parameter(name).grad
        assert close(gradient, parameter.grad, 1e-10) and float(gradient.abs().max()) > 1e-6, name  # type: ignore[union-attr]
    for name, parameter in plain.frame.named_parameters():
        assert close(supernet.frame.get_parameter(name).grad, parameter.grad, 1e-10), name
    seen: dict[int, int] = {}
    for mine, theirs, index in pairs(plain, supernet):
        assert close(theirs.grad[index].view_as(mine), mine.grad, 1e-10)  # type: ignore[index]
        seen[id(theirs)] = seen.get(id(theirs), 0) + mine.numel()
    batched = [p for _, cell in supernet.frame.all_cells() for mixed in cell.mixed for f in mixed.families for p in f.parameters()]  # type: ignore[union-attr]
    assert seen == {id(p): p.numel() for p in batched}  # every weight was compared, once


@pytest.mark.parametrize("lean", [False, True])
def test_darts(lean: bool) -> None:
    supernet = made("darts", lean=lean)
    compare(plain_of(supernet), supernet, *batch())


def test_darts_odd_image() -> None:
    supernet = made("darts", lean=True, settings={"image": 7, "channels": 4})
    compare(plain_of(supernet), supernet, *batch(size=7))


def test_nb201() -> None:
    supernet = made("nb201")
    compare(plain_of(supernet), supernet, *batch())


@pytest.mark.parametrize("name", ["darts", "nb201"])
def test_partial(name: str) -> None:
    supernet = made(name, policy="partial")
    compare(plain_of(supernet), supernet, *batch())
    assert len(supernet.derive()) == len(supernet.space.decisions)


def test_a_planted_error_is_seen() -> None:
    supernet = made("nb201")
    plain = plain_of(supernet)
    with torch.no_grad():
        next(iter(pairs(plain, supernet)))[1][0] *= 1 + 1e-6
    with pytest.raises(AssertionError):
        compare(plain, supernet, *batch())


def test_a_users_op_is_mixed_too() -> None:
    register_op(
        "test_double_conv", lambda a, b, stride, affine: nn.Sequential(nn.Conv2d(a, b, 1, stride), nn.BatchNorm2d(b, affine=affine))
    )
    try:
        ops = ("none", "skip_connect", "dil_conv_3x3", "test_double_conv")
        supernet = made("darts", settings={"ops": ops, "channels": 4})
        plain = plain_of(supernet)
        x, y = batch()
        assert abs(float(loss_of(plain, x, y) - loss_of(supernet, x, y))) <= 1e-12
        assert close(supernet.architecture.weights.grad, plain.architecture.weights.grad, 1e-10)
    finally:
        del _OPS["test_double_conv"]


@pytest.mark.parametrize("name", ["nb201", "darts"] if FULL else ["nb201"])
def test_checkpointed_cells_finish_with_equal_gradients(name: str) -> None:
    x, y = batch()
    supernet = made(name)
    first = loss_of(supernet, x, y)
    before = {name: p.grad for name, p in supernet.named_parameters()}
    supernet.checkpoint = True
    assert abs(float(first - loss_of(supernet, x, y))) <= 1e-12
    for name, parameter in supernet.named_parameters():
        assert close(parameter.grad, before[name], 1e-12), name


def test_two_batches_never_share_a_result() -> None:
    supernet = made("nb201").eval()
    (first, _), (second, _) = batch(), batch(seed=1)
    with torch.no_grad():
        one, other, again = supernet(first), supernet(second), supernet(first)
        assert torch.equal(one, again) and not torch.allclose(one, other)
        supernet.architecture.weights.neg_()
        assert not torch.allclose(supernet(first), one)  # the largest op is another


def test_errors_say_what_to_do() -> None:
    space = load_space("darts", **SMALL["darts"])
    for wrong in ({"policy": "al"}, {"k": 0}, {"estimator": "x"}, {"policy": "partial", "parts": 3}, {"depthwise": "cuda"}):
        with pytest.raises(RidgelineError):
            make_supernet(space, **wrong)  # type: ignore[arg-type]
    with pytest.raises(RidgelineError, match="mixed ops"):
        make_supernet(load_space("transformer"))
