"""Random models, every pass alone and all of them together: the answers stay within 1e-9."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.transform.graph.manager import PASSES, PassContext, run_passes
from tests.support import FULL, full_or_tenth
from tests.transform.graph.random_graphs import again, assert_same, random_capture, random_model

PRESENT = [name for name, home in PASSES.items() if importlib.util.find_spec("ridgeline.transform.graph" + home)]
CHOSEN = [name for name in PRESENT if FULL or name != "layout"]  # it times ops, and its own tests give it random graphs too
CONTEXT = PassContext(dtype=torch.float64)
SLOW = settings(
    max_examples=full_or_tenth(300), deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@SLOW
@given(st.integers(0, 1 << 30))
def test_each_pass_and_the_pipeline_keep_the_answers(seed: int) -> None:
    length = None if FULL else 5 + seed % 9  # shorter models in the normal run: capture is most of its time
    model, _ = random_model(seed, length)
    captured = random_capture(seed, length)
    for names in ([name] for name in CHOSEN):
        graph = again(captured)
        if any(report.changed for report in run_passes(graph, names, CONTEXT, check=False)):
            assert_same(graph, model)
    graph = again(captured)
    run_passes(graph, CHOSEN, CONTEXT)
    assert_same(graph, model)
    assert all(node.users or node.op in ("placeholder", "output") or node.op == "call_function" for node in graph.module.graph.nodes)


@pytest.mark.parametrize("seed", [3, 6])
def test_the_generator_repeats_itself(seed: int) -> None:
    one, other = random_model(seed), random_model(seed)
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    with torch.no_grad():
        results = [model(*(value.clone() for value in inputs)) for model, inputs in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
