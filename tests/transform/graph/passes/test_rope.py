"""Rotary positions of query and key become one call where the kernel wins; near misses stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ridgeline.transform.graph import fused_ops
from tests.transform.graph.pattern_cases import Formula, run

B, H, K, T, D = 2, 4, 2, 5, 8


@pytest.fixture
def winning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ops, "no_win", lambda *args, **kwargs: None)


def inputs(heads_last: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, T, H, D), (B, T, K, D)) if heads_last else ((B, H, T, D), (B, K, T, D))
    first, second = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return first, second


def tables() -> dict[str, Tensor]:
    angle = torch.arange(T)[:, None] * torch.linspace(1, 0.1, D // 2, dtype=torch.float64)
    angle = torch.cat((angle, angle + 0.2), -1)  # halves that differ: taking one for the other shows
    return {"cos": angle.cos(), "sin": angle.sin()}


def by_slices(x: Tensor) -> Tensor:
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)


def by_chunk(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def swapped(x: Tensor) -> Tensor:
    first, second = x.split(D // 2, dim=-1)
    return torch.cat((second, first), dim=-1)


@pytest.mark.parametrize("half", [by_slices, by_chunk, swapped])
def test_query_and_key_in_one_call(half: Callable[[Tensor], Tensor], winning: None) -> None:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos + half(q) * sin, half(k) * sin + cos * k

    ran = run(Formula(turned, **tables()), inputs(), "rope")
    assert ran.only("graph_rope").args[4:] == (half is swapped, 2)
    assert ran.count("cat", "neg", "mul") == 0


def test_tables_with_a_dimension_for_heads(winning: None) -> None:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos[None].expand(q.size(0), T, D).unsqueeze(2), sin[None].expand(q.size(0), T, D).unsqueeze(2)
        return q * cos + by_slices(q) * sin, k * cos + by_slices(k) * sin

    ran = run(Formula(turned, **tables()), inputs(heads_last=True), "rope", "dead")
    assert ran.only("graph_rope").args[5] == 1
    assert ran.count("unsqueeze") <= 2  # those of [None]


def test_one_that_is_read_early_goes_alone(winning: None) -> None:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = q * cos + by_slices(q) * sin
        key = k + first.sum()
        return key * cos + by_slices(key) * sin

    ran = run(Formula(turned, **tables()), inputs(), "rope")
    assert ran.count("graph_rope_one") == 2


NEAR_MISSES: dict[str, Callable[..., object]] = {
    "halves in place": lambda q, k, cos, sin: q * cos + torch.cat((-q[..., : D // 2], q[..., D // 2 :]), -1) * sin,
    "minus on the other half": lambda q, k, cos, sin: q * cos + torch.cat((q[..., D // 2 :], -q[..., : D // 2]), -1) * sin,
    "uneven halves": lambda q, k, cos, sin: q * cos + torch.cat((-q[..., 3:], q[..., :3]), -1) * sin,
    "another tensor": lambda q, k, cos, sin: q * cos + by_slices(q + 1.0) * sin,
    "over heads": lambda q, k, cos, sin: q * cos + torch.cat((-q[:, H // 2 :], q[:, : H // 2]), 1) * sin,
    "halves read twice": lambda q, k, cos, sin: (q * cos + (h := by_slices(q)) * sin, h),
    "a difference": lambda q, k, cos, sin: q * cos - by_slices(q) * sin,
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay(case: str, winning: None) -> None:
    assert run(Formula(NEAR_MISSES[case], **tables()), inputs(), "rope", tolerance=0.0).changed == []


def test_refused_without_a_gpu() -> None:
    ran = run(Formula(lambda q, k, cos, sin: q * cos + by_slices(q) * sin, **tables()), inputs(), "rope", tolerance=0.0)
    assert ran.changed == []
    assert "GPUs" in ran.refused[0]
