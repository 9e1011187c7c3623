"""Random graphs with views, in-place ops, shared weights and dead code: order, arena and recomputation keep every bit."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import TransformError
from ridgeline.transform.graph.capture import Captured
from ridgeline.transform.graph.memory.facts import tensors_in
from ridgeline.transform.graph.memory.lifetimes import lifetimes
from ridgeline.transform.graph.memory.order import reorder
from ridgeline.transform.graph.memory.outs import same_bits
from ridgeline.transform.graph.memory.plan import plan
from ridgeline.transform.graph.memory.remat import rematerialise
from ridgeline.transform.graph.memory.static import StaticModule
from tests.support import full_or_tenth
from tests.transform.graph.random_graphs import random_capture


def run(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors_in(module(*(tensor.clone() for tensor in inputs)))


def inputs_of(captured: Captured, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype) for tensor in captured.inputs)


@pytest.mark.parametrize("seed", range(full_or_tenth(60)))
def test_every_bit_is_kept(seed: int) -> None:
    captured = random_capture(seed)
    given = [inputs_of(captured, number) for number in range(2)]
    expected = [run(captured.module, inputs) for inputs in given]

    def same(module: torch.nn.Module) -> bool:
        pairs = [pair for inputs, old in zip(given, expected, strict=True) for pair in zip(run(module, inputs), old, strict=True)]
        return all(same_bits(ours, theirs) for ours, theirs in pairs)

    assert same(StaticModule(captured, poison=True, reuse=False))
    assert same(StaticModule(captured, poison=True))
    reorder(captured)
    assert same(captured.module)
    runner = StaticModule(captured, poison=True)
    assert same(runner)
    assert runner.plan.over_bound <= 0.10
    whole = plan(lifetimes(captured)).arena_bytes
    for share in (0.9, 0.75):
        try:
            rematerialise(captured, int(whole * share), measure=False)
        except TransformError as error:
            assert "cannot be met" in error.what
        assert same(captured.module)
        assert same(StaticModule(captured, poison=True))
