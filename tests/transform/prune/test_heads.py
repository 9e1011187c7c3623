"""Heads removed: the same function where the heads were zero, grouping kept, forward passes still right, also in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.prune.heads import HeadCut, attention_layers, choose_heads, cut_heads, head_counts, head_scores, prune_heads
from ridgeline.workload.data import Data, Split
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig

CONFIG = DecoderConfig(layers=2, hidden=48, intermediate=32, heads=6, kv_heads=3, vocab=50, rope_theta=1e4, qkv_bias=True)
TOKENS = torch.arange(10)[None] * 7 % 50
POSITIONS = torch.arange(10)


def decoder(config: DecoderConfig = CONFIG) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(config).eval()


def silence(attention: Any, heads: list[int]) -> None:
    """Zero the columns of o that read these query heads."""
    attention.o_proj.weight.data.unflatten(1, (-1, attention.head_dim))[:, heads] = 0


def decoded(model: CausalLM, kv_heads: int) -> torch.Tensor:
    """Logits of ten tokens given one by one, through a cache."""
    cache = [(torch.zeros(1, kv_heads, 10, 8), torch.zeros(1, kv_heads, 10, 8)) for _ in range(2)]
    with torch.no_grad():
        return torch.cat([model(TOKENS[:, at : at + 1], torch.tensor([at]), cache) for at in range(10)], 1)


@pytest.mark.parametrize(("unit", "silent", "counts"), [("group", [2, 3], (4, 2)), ("query", [0, 3, 5], (3, 3))])
def test_silent_heads_leave_without_a_trace(unit: Any, silent: list[int], counts: tuple[int, int]) -> None:
    """One whole group of two, or one head of each group: magnitude finds them, the logits stay, prefill and decode."""
    model = decoder()
    for attention in attention_layers(model).values():
        silence(attention, silent)
    wanted, told = model(TOKENS, POSITIONS), decoded(model, 3)
    cuts = prune_heads(model, 1 / 3 if unit == "group" else 0.5, unit=unit)
    kept = tuple(head for head in range(6) if head not in silent)
    assert [cut.query_heads for cut in cuts] == [kept, kept]
    assert all(head_counts(a) == counts for a in attention_layers(model).values())
    assert torch.allclose(model(TOKENS, POSITIONS), wanted, atol=1e-5)
    assert torch.allclose(decoded(model, counts[1]), told, atol=1e-5)


def test_bias_rows_follow() -> None:
    model = decoder()
    attention: Any = model.model.layers[0].self_attn
    before = attention.q_proj.bias.detach().clone()
    cut_heads(attention, HeadCut("x", (1, 4), (0, 2)))
    assert torch.equal(attention.q_proj.bias, torch.cat([before[8:16], before[32:40]]))
    assert attention.o_proj.in_features == 16 and attention.k_proj.out_features == 16


def test_choice_is_per_group() -> None:
    """Query heads go evenly: the best of each group stays even where a whole group scores low."""
    scores = torch.tensor([9.0, 8.0, 0.1, 0.2, 5.0, 7.0])
    assert choose_heads("x", scores, 3, 0.5, "query").query_heads == (0, 3, 5)
    assert choose_heads("x", scores, 3, 0.34, "group") == HeadCut("x", (0, 1, 4, 5), (0, 2))
    assert choose_heads("x", scores, 3, 0.99, "group").kv_heads == (0,)  # one always stays
    assert choose_heads("x", torch.ones(4), 2, 0.5, "group").kv_heads == (0,)  # of equal ones the first stays


def test_taylor_is_the_gradient_of_a_gate() -> None:
    model = decoder()
    layers = attention_layers(model)
    split = Split(TOKENS, TOKENS.roll(-1, 1))
    data = Data("t", "tokens", 50, split, split)
    got = head_scores(model, layers, data=data, batches=1, batch=1)
    gates = {name: torch.ones(6, requires_grad=True) for name in layers}
    for name, attention in layers.items():
        gate = gates[name]
        attention.o_proj.register_forward_pre_hook(lambda m, a, g=gate: ((a[0].unflatten(-1, (6, 8)) * g[:, None]).flatten(-2),))
    nn.functional.cross_entropy(model(TOKENS, POSITIONS)[0], split.targets[0]).backward()
    for name, gate in gates.items():
        assert gate.grad is not None and torch.allclose(got[name], gate.grad.abs(), rtol=1e-3, atol=1e-7)


def test_planted_wrong_grouping_shows() -> None:
    """Cutting query heads unevenly moves the others to another key-value head: not the same function."""
    model = decoder()
    attention: Any = model.model.layers[0].self_attn
    silence(attention, [0, 1, 2])
    wanted = model(TOKENS, POSITIONS)
    cut_heads(attention, HeadCut("x", (3, 4, 5), (0, 1, 2)))  # all of group 0 and half of group 1
    assert not torch.allclose(model(TOKENS, POSITIONS), wanted, atol=1e-3)


def test_transformers_llama() -> None:
    """Counts kept as attributes follow, so repeat_kv still groups rightly."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).eval()
    attention = next(iter(attention_layers(model).values()))
    silence(attention, [1, 2, 5])
    wanted = model(TOKENS, use_cache=False).logits
    prune_heads(model, 0.5, unit="query")
    assert attention.num_key_value_groups == 1 and head_counts(attention) == (3, 3)
    assert torch.allclose(model(TOKENS, use_cache=False).logits, wanted, atol=1e-5)


def test_what_is_refused() -> None:
    with pytest.raises(TransformError, match="no attention layer"):
        prune_heads(nn.Sequential(nn.Linear(4, 4)), 0.5)
    with pytest.raises(TransformError, match="no head removed"):
        prune_heads(decoder(), 0.01)
    broken = decoder()
    broken.model.layers[1].self_attn.o_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(TransformError, match=r"layers\.1"):
        prune_heads(broken, 0.5)
    odd = decoder()
    odd.model.layers[0].self_attn.k_proj = nn.Linear(48, 32)
    with pytest.raises(TransformError, match="whole groups"):
        prune_heads(odd, 0.5)


def test_magnitude_counts_the_values_of_its_own_group() -> None:
    """Query head i reads key-value head i // 2."""
    attention: Any = decoder().model.layers[0].self_attn
    for group, size in enumerate((1.0, 10.0, 100.0)):
        attention.v_proj.weight.data.view(3, 8, 48)[group] = size
    attention.o_proj.weight.data.fill_(1.0)
    scores = head_scores(nn.Identity(), {"x": attention})["x"]
    assert torch.allclose(scores / scores[0], torch.tensor([1.0, 1.0, 10.0, 10.0, 100.0, 100.0]))
