"""The masked form of `sample`, all ops with flags on the device, is the form that computes the drawn ops alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.search.spaces import load_space
from ridgeline.search.spaces.ops import _OPS, register_op
from ridgeline.search.supernet.draws import Draw, packed
from ridgeline.search.supernet.network import Supernet, make_supernet
from ridgeline.search.supernet.step import SearchStep, make_optimisers


def made(name: str, **options: object) -> Supernet:
    ops = options.pop("ops", None)
    space = load_space(name, channels=4, cells=3 if name == "darts" else 1, image=8, **({"ops": ops} if ops else {}))
    supernet = make_supernet(space, policy="sample", **options).double()  # type: ignore[arg-type]
    torch.manual_seed(3)
    with torch.no_grad():
        supernet.architecture.weights.normal_()
    return supernet


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 8, 8, generator=random).double(), torch.arange(4)


def gradients(supernet: Supernet, drawn: Draw | Tensor) -> list[Tensor]:
    """The loss, then every parameter's; zeros where none came."""
    x, y = batch()
    loss = functional.cross_entropy(supernet(x, drawn), y)
    parameters = list(supernet.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True))]


def compare(supernet: Supernet, draws: int) -> None:
    drawn = [supernet.sample() for _ in range(draws)]
    assert len({one.columns for one in drawn}) == draws
    for draw, sent in zip(drawn, packed(drawn, supernet.architecture.weights).unbind(0), strict=True):
        path, masked = gradients(supernet, draw), gradients(supernet, sent)
        assert float(path[1].abs().max()) > 1e-6
        for exact, ours in zip(path, masked, strict=True):
            assert float((exact - ours).abs().max()) <= 1e-10 * max(1.0, float(exact.abs().max()))
        rows = [(exact == 0).flatten(1).all(1) for exact in path if exact.dim() > 2]
        undrawn = [ours[off] for off, ours in zip(rows, (one for one in masked if one.dim() > 2), strict=True)]
        assert sum(map(len, undrawn)) > 3 and not any(bool(one.any()) for one in undrawn)  # exactly zero


@pytest.mark.parametrize("name", ["darts", "nb201"])
@pytest.mark.parametrize("estimator", ["straight_through", "score"])
def test_masked_is_the_drawn_path(name: str, estimator: str) -> None:
    compare(made(name, estimator=estimator), 2)


def test_a_planted_error_is_seen() -> None:
    supernet = made("nb201")
    draw = supernet.sample()
    sent = packed([draw], supernet.architecture.weights)[0]
    row = next(row for row, column in enumerate(draw.columns) if supernet.ops[column] != "none")
    sent[0, row] = sent[0, row].roll(1)  # another op of one edge
    assert abs(float(gradients(supernet, draw)[0] - gradients(supernet, sent)[0])) > 1e-6


def test_what_a_users_op_gives_undrawn_is_not_read() -> None:
    class Wild(torch.nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.inf

    register_op("test_wild", lambda a, b, stride, affine: Wild(a, b, 1, stride))
    try:
        supernet = made("darts", ops=("none", "skip_connect", "dil_conv_3x3", "test_wild"))
        with torch.no_grad():
            supernet.architecture.weights[:, 3] = -1e3
        compare(supernet, 1)
    finally:
        del _OPS["test_wild"]


def test_a_share_of_zero_has_a_gradient_of_zero() -> None:
    supernet = made("nb201", estimator="score")
    with torch.no_grad():
        supernet.architecture.weights[:, 3] = -1e6
    draw = supernet.sample()
    for drawn in (draw, packed([draw], supernet.architecture.weights)[0]):
        assert all(bool(torch.isfinite(one).all()) for one in gradients(supernet, drawn))


def test_masked_steps_are_the_steps() -> None:
    """What a captured step runs, not captured: the same draws, losses and parameters, decay and momentum of undrawn weights included."""
    first = made("nb201")
    second = copy.deepcopy(first)
    masked, path = (SearchStep(net, *make_optimisers(net, architecture_rate=0.01)) for net in (first, second))
    masked.graph, masked.warm = True, 9  # never captured
    x, y = batch()
    for valid in ((x.flip(0), y), (x.flip(2), y), None):
        losses = masked((x, y), valid), path((x, y), valid)
        assert abs(float(losses[0].weights - losses[1].weights)) < 1e-10 and first.draws == second.draws
        assert (losses[0].architecture is None) == (losses[1].architecture is None) == (valid is None)
    assert first.draws == 5 and first.skipped_share == second.skipped_share
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)
