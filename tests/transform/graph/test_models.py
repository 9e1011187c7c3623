"""The twelve models keep their answers (float64: 1e-9, float32: as near the truth as before), compile and export again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.transform.graph.optimize import optimize
from ridgeline.transform.graph.suite import SUITE, suite_case
from tests.support import FULL

SHORT = ("bert", "shared-convs", "two-consumers")
QUICK: dict[str, Any] = {"measure": False, "predict": False, "memory": "none", "require_gain": False}
EPS32 = 2e-6


def outputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        found = module(*(one.clone() for one in inputs))
    return [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def others(inputs: tuple[Tensor, ...], batch: int) -> tuple[Tensor, ...]:
    """Fresh inputs of another batch; positions, which have none, are kept."""
    first = inputs[0].shape[0]
    made = []
    for one in inputs:
        if one.shape[0] != first:
            made.append(one)
        elif one.is_floating_point():
            made.append(torch.randn(batch, *one.shape[1:], dtype=one.dtype))
        else:
            made.append(torch.randint(0, max(2, int(one.max()) + 1), (batch, *one.shape[1:])))
    return tuple(made)


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected)
    assert all(ours.shape == theirs.shape for ours, theirs in zip(found, expected, strict=True))
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in zip(found, expected, strict=True))


def doubled(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.double() if one.is_floating_point() else one for one in inputs)


def test_there_are_twelve() -> None:
    assert len(SUITE) == len(set(SUITE)) == 12 and set(SHORT) <= set(SUITE)


@pytest.mark.parametrize("name", SUITE if FULL else SHORT)
def test_float64_answers_are_kept(name: str) -> None:
    case = suite_case(name, dtype=torch.float64)
    made, change = optimize(case.module, case.inputs, name=name, **QUICK)
    assert change.details["batch_dynamic"], change.notes
    for batch in (2, 3):
        inputs = others(case.inputs, batch)
        assert error(outputs(made, inputs), outputs(case.module, inputs)) <= 1e-9
    layout = next(one for one in change.details["passes"] if one["name"] == "layout")
    assert layout["nodes_before"] <= change.details["nodes"]["before"]  # layout itself puts conversions in, where they pay
    assert layout["nodes_after"] - layout["nodes_before"] < max(3, change.details["nodes"]["before"] / 10)


@pytest.mark.parametrize("name", SUITE if FULL else ("digits-cnn", "llama"))
def test_float32_is_as_near_as_before(name: str) -> None:
    case, wide = suite_case(name), suite_case(name, dtype=torch.float64)
    made, _ = optimize(case.module, case.inputs, name=name, **QUICK)
    for batch in (2, 5):
        inputs = others(case.inputs, batch)
        truth = outputs(wide.module, doubled(inputs))
        before = error(outputs(case.module, inputs), truth)
        assert error(outputs(made, inputs), truth) <= 2 * before + EPS32


@pytest.mark.parametrize("name", SUITE if FULL else ("digits-cnn",))
def test_what_comes_out_exports_again(name: str) -> None:
    case = suite_case(name)
    made, _ = optimize(case.module, case.inputs, name=name, check=False, **QUICK)
    program = torch.export.export(made, case.inputs, strict=False)
    assert error(outputs(program.module(), case.inputs), outputs(made, case.inputs)) <= 1e-6


@pytest.mark.skipif(not FULL, reason="compiles: RIDGELINE_FULL=1")
@pytest.mark.parametrize("name", ["digits-cnn", "resnet18", "bert", "llama"])
def test_what_comes_out_compiles(name: str) -> None:
    torch._dynamo.reset()
    case = suite_case(name)
    made, _ = optimize(case.module, case.inputs, name=name, check=False, **QUICK)
    compiled: Any = torch.compile(made, fullgraph=True)
    assert error(outputs(compiled, case.inputs), outputs(case.module, case.inputs)) <= 1e-4


@pytest.mark.skipif(not FULL, reason="twelve arenas: RIDGELINE_FULL=1")
@pytest.mark.parametrize("name", SUITE)
def test_arena_is_near_its_bound_and_gives_the_same_bits(name: str) -> None:
    case = suite_case(name)
    made, change = optimize(case.module, case.inputs, name=name, check=False, **{**QUICK, "memory": "static"})
    plan = change.details["memory"]
    assert plan["used"] and plan["arena_bytes"] <= 1.03 * plan["lower_bound_bytes"]
    eager = made.graph_module
    for ours, theirs in zip(outputs(made, case.inputs), outputs(eager, case.inputs), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not FULL, reason="imports transformers: RIDGELINE_FULL=1")
def test_hugging_face_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    made, change = optimize(model, {"input_ids": torch.randint(64, (2, 8))}, **QUICK)
    fresh = torch.randint(64, (3, 8))
    with torch.no_grad():
        before = model(input_ids=fresh).logits
        found = torch.utils._pytree.tree_leaves(made(input_ids=fresh))[0]
        truth = model.double()(input_ids=fresh).logits
    assert error([found], [truth]) <= 2 * error([before], [truth]) + EPS32
    assert any(one["name"] == "attention" and one["changed_sites"] for one in change.details["passes"])


def test_a_wrong_answer_would_be_seen() -> None:
    case = suite_case("shared-convs", dtype=torch.float64)
    made, _ = optimize(case.module, case.inputs, **QUICK)
    weight = next(iter(made.parameters()))
    with torch.no_grad():
        weight.mul_(1 + 1e-6)
    assert error(outputs(made, case.inputs), outputs(case.module, case.inputs)) > 1e-9
