"""Attention heads removed for real, aware of grouped key-value heads.

    q_proj [H·d, hidden]   k_proj, v_proj [K·d, hidden]   o_proj [hidden, H·d]        H query heads, K key-value heads, d = head_dim
      query head i reads key-value head i // (H / K)

    unit "group": whole groups go: their rows of k and v, the H/K query heads that read them and those columns of o
    unit "query": the same number of query heads goes from every group, so that the grouping i // (H' / K) still holds; k, v stay

For modules with q_proj, k_proj, v_proj, o_proj (linear) and head_dim that read the head counts from the shapes, as
workload/models/decoder.py and the Llama family of transformers do; counts kept as attributes are brought up to date.
Scores: magnitude, ‖rows of v (shared by their group)‖·‖columns of o‖ of a head, or taylor, |Σ w·∂L/∂w| over the columns of o,
which is |∂L/∂ξ| for a gate ξ on the head's output. Ref: Michel 2019 (head importance), Ainslie 2023 (grouped heads).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ...core.errors import TransformError
from .scores import check_sparsity, gradients_of

if TYPE_CHECKING:
    from ...workload.data import Data

Unit = Literal["group", "query"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class HeadCut:
    """What stays of one attention layer."""

    layer: str
    query_heads: tuple[int, ...]  # kept, ascending
    kv_heads: tuple[int, ...]


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """Every module with separate q, k, v and o projections, its head counts checked."""
    found = {
        name: module
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, part, None), nn.Linear) for part in PROJECTIONS) and hasattr(module, "head_dim")
    }
    if not found:
        raise TransformError(
            "no attention layer with q_proj, k_proj, v_proj, o_proj and head_dim",
            why="heads can only be cut where each projection is a linear layer of its own",
            do="prune this model by channels or magnitude instead",
        )
    for name, module in found.items():
        heads, kv_heads = head_counts(module)
        if heads < 1 or kv_heads < 1 or heads % kv_heads or module.o_proj.in_features != module.q_proj.out_features:
            raise TransformError(
                f"{name}: {heads} query and {kv_heads} key-value heads of {module.head_dim}",
                why="the projections do not hold whole groups of heads",
                do="check the layer's shapes",
            )
    return found


def head_counts(attention: Any) -> tuple[int, int]:
    """(query heads, key-value heads), from the shapes."""
    return attention.q_proj.out_features // attention.head_dim, attention.k_proj.out_features // attention.head_dim


def head_scores(
    model: nn.Module, layers: Mapping[str, Any], *, data: Data | None = None, batches: int = 8, batch: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """A score for each query head of each layer [H]: taylor where there is data, else magnitude."""
    outputs = [attention.o_proj.weight for attention in layers.values()]
    if data is None:
        return {name: _magnitude(attention) for name, attention in layers.items()}
    totals = {name: torch.zeros(head_counts(a)[0], device=a.o_proj.weight.device) for name, a in layers.items()}
    for gradients in gradients_of(model, outputs, data, batches=batches, batch=batch, seed=seed):
        for (name, attention), weight, gradient in zip(layers.items(), outputs, gradients, strict=True):
            if gradient is not None:
                totals[name] += (weight.detach() * gradient).float().unflatten(1, (-1, attention.head_dim)).sum((0, 2)).abs()
    return totals


def _magnitude(attention: Any) -> Tensor:
    heads, kv_heads = head_counts(attention)
    value: Tensor = attention.v_proj.weight.detach().float().view(kv_heads, -1).norm(dim=1)  # [K]
    out: Tensor = attention.o_proj.weight.detach().float().unflatten(1, (heads, -1)).norm(dim=(0, 2))  # [H]
    return value.repeat_interleave(heads // kv_heads) * out


def choose_heads(layer: str, scores: Tensor, kv_heads: int, sparsity: float, unit: Unit) -> HeadCut:
    """The cut that removes about this share of the query heads, the lowest scores, at least one group and one head a group staying."""
    check_sparsity(sparsity)
    if not bool(torch.isfinite(scores).all()):
        raise TransformError(
            f"{layer} has a head score that is not finite", why="its weights or gradients are NaN", do="repair the weights"
        )
    each = len(scores) // kv_heads
    grouped = scores.view(kv_heads, each)
    if unit == "group":
        keep = max(1, kv_heads - round(sparsity * kv_heads))
        groups = grouped.sum(1).argsort(descending=True, stable=True)[:keep].sort().values.tolist()
        return HeadCut(layer, tuple(g * each + i for g in groups for i in range(each)), tuple(groups))
    keep = max(1, each - round(sparsity * each))
    inside = grouped.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(dim=1).values.tolist()  # [K, keep]
    return HeadCut(layer, tuple(g * each + i for g, row in enumerate(inside) for i in row), tuple(range(kv_heads)))


def cut_heads(attention: Any, cut: HeadCut) -> None:
    """Replace the four projections by smaller ones, in place, and bring stored counts up to date."""
    size = attention.head_dim
    attention.q_proj = _rows(attention.q_proj, _expand(cut.query_heads, size))
    attention.k_proj = _rows(attention.k_proj, _expand(cut.kv_heads, size))
    attention.v_proj = _rows(attention.v_proj, _expand(cut.kv_heads, size))
    attention.o_proj = _columns(attention.o_proj, _expand(cut.query_heads, size))
    counts = {
        "num_heads": len(cut.query_heads),
        "num_attention_heads": len(cut.query_heads),
        "num_key_value_heads": len(cut.kv_heads),
        "num_key_value_groups": len(cut.query_heads) // len(cut.kv_heads),
    }
    for name, value in counts.items():
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, value)


def _expand(heads: tuple[int, ...], size: int) -> Tensor:
    return (torch.tensor(heads)[:, None] * size + torch.arange(size)).flatten()


def _rows(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    rows = rows.to(linear.weight.device)
    return _linear(linear, linear.weight.detach()[rows], None if linear.bias is None else linear.bias.detach()[rows])


def _columns(linear: nn.Linear, columns: Tensor) -> nn.Linear:
    columns = columns.to(linear.weight.device)
    return _linear(linear, linear.weight.detach()[:, columns], None if linear.bias is None else linear.bias.detach())


def _linear(old: nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype)
    new.weight = nn.Parameter(weight.contiguous(), requires_grad=old.weight.requires_grad)
    if bias is not None:
        new.bias = nn.Parameter(bias.clone(), requires_grad=old.weight.requires_grad)
    return new.train(old.training)


def prune_heads(model: nn.Module, sparsity: float, *, unit: Unit = "group", data: Data | None = None, seed: int = 0) -> list[HeadCut]:
    """Cut every attention layer of `model` in place by the same share; gives what stayed where."""
    layers = attention_layers(model)
    scores = head_scores(model, layers, data=data, seed=seed)
    cuts = []
    for name, attention in layers.items():
        cuts.append(choose_heads(name, scores[name], head_counts(attention)[1], sparsity, unit))
        cut_heads(attention, cuts[-1])
    if all(len(cut.query_heads) == len(scores[cut.layer]) for cut in cuts):
        raise TransformError(
            f"no head removed at sparsity {sparsity} by {unit}",
            why="every layer has too few heads of that unit for the share to round to one",
            do="raise sparsity, or try the other unit",
        )
    return cuts
