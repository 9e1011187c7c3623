"""Attention by hand in many forms becomes one op with the same answers; what only looks like it stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.transform.graph.pattern_cases import Formula, run

B, H, T, D = 2, 3, 5, 8
SDPA = "scaled_dot_product_attention"


def heads(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    one, two, three = (torch.randn(shape or (B, H, T, D), dtype=torch.float64, generator=generator) for _ in range(3))
    return one, two, three


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(1, T, T, dtype=q.dtype).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    scores = torch.baddbmm(mask.expand(q.size(0), T, T), q, k.transpose(1, 2), alpha=0.3)
    return torch.bmm(scores.softmax(-1), v)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores /= math.sqrt(D)
    return torch.softmax(scores, -1) @ v


def laid_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # the view needs a contiguous product, and SDPA's result is not
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).view(q.size(0), H, T * D)


FORMS: dict[str, Callable[..., Tensor]] = {
    "scale after": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1) @ v,
    "divided": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=3) @ v,
    "scale first": lambda q, k, v: torch.softmax((0.3 * q) @ (k / 2.0).transpose(2, 3), dim=-1) @ v,
    "no scale": lambda q, k, v: torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)), dim=-1).matmul(v),
    "dropout": lambda q, k, v: functional.dropout(torch.softmax(q @ k.mT, -1), 0.5, training=False) @ v,
    "in place": in_place,
    "einsum": lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v),
    "view of the result": laid_out,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_without_a_mask(form: str) -> None:
    ran = run(Formula(FORMS[form]), heads(), "attention")
    assert len(ran.changed) == 1
    assert ran.count(SDPA) == 1
    assert ran.count("softmax") == 0
    assert ran.saved_bytes > 0


def test_einsum_with_heads_in_the_middle() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.2).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    ran = run(Formula(attend), heads(B, T, H, D), "attention")
    assert ran.count(SDPA) == 1
    assert ran.count("einsum") == 0


def test_three_dimensions_get_a_fourth() -> None:
    ran = run(Formula(by_baddbmm), heads(B * H, T, D), "attention", dynamic_batch=False)
    node = ran.only(SDPA)
    assert node.args[5] is True  # the mask that was built is causal
    assert node.meta["val"].dim() == 4


def causal(value: float) -> Tensor:
    return torch.zeros(T, T, dtype=torch.float64).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), value)


@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float64).min, -1e30])
def test_a_causal_constant_becomes_is_causal(value: float) -> None:
    attend = Formula(lambda q, k, v, mask: torch.softmax(q @ k.mT + mask, -1) @ v, mask=causal(value))
    node = run(attend, heads(), "attention").only(SDPA)
    assert node.args[3] is None
    assert node.args[5] is True


def test_almost_causal_is_kept_as_a_mask() -> None:
    mask = causal(-math.inf)
    mask[3, 1] = -0.5
    attend = Formula(lambda q, k, v, mask: torch.softmax(q @ k.mT + mask, -1) @ v, mask=mask)
    node = run(attend, heads(), "attention").only(SDPA)
    assert node.args[3] is not None
    assert node.args[5] is False


def test_a_weak_fill_is_not_causal() -> None:
    attend = Formula(lambda q, k, v, mask: torch.softmax(q @ k.mT + mask, -1) @ v, mask=causal(-3.0))
    assert run(attend, heads(), "attention").only(SDPA).args[3] is not None


def test_a_mask_of_zeros_is_dropped() -> None:
    attend = Formula(lambda q, k, v, mask: torch.softmax(q @ k.mT + mask, -1) @ v, mask=torch.zeros(T, T, dtype=torch.float64))
    node = run(attend, heads(), "attention").only(SDPA)
    assert node.args[3] is None
    assert node.args[5] is False


def test_a_mask_of_the_batch_size_alone_is_looked_at() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row = torch.arange(T)
        hidden = (row[None, :] > row[:, None]).expand(q.size(0), 1, T, T)
        return torch.softmax((q @ k.mT).masked_fill(hidden, -math.inf), -1) @ v

    node = run(Formula(attend), heads(), "attention", dynamic_batch=True).only(SDPA)
    assert node.args[5] is True


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float64).min])
def test_boolean_masks_of_an_input(fill: float) -> None:
    attend = Formula(lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(v[..., :1].mT > 0.5, fill), -1) @ v)
    ran = run(attend, heads(), "attention")
    assert ran.only(SDPA).args[3] is not None
    where = Formula(lambda q, k, v: torch.softmax(torch.where(v[..., :1].mT < 0.5, q @ k.mT, fill), -1) @ v)
    assert run(where, heads(), "attention").count(SDPA) == 1


def test_two_masks_are_added() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((q @ k.mT * 0.5).masked_fill(mask, -math.inf) + v[..., :1].mT, -1) @ v

    ran = run(Formula(attend, mask=torch.ones(T, T, dtype=torch.bool).triu(1)), heads(), "attention")
    assert ran.only(SDPA).args[5] is False


@pytest.mark.parametrize("repeat", ["expand", "repeat_interleave"])
def test_repeated_heads_are_grouped(repeat: str) -> None:
    def many(x: Tensor) -> Tensor:
        if repeat == "repeat_interleave":
            return x.repeat_interleave(2, 1)
        return x[:, :, None].expand(x.size(0), H, 2, T, D).reshape(x.size(0), 2 * H, T, D)

    q, k, v = heads()[0].repeat(1, 2, 1, 1) * torch.linspace(1, 2, 2 * H, dtype=torch.float64)[:, None, None], *heads()[1:]
    ran = run(Formula(lambda q, k, v: torch.softmax(q @ many(k).mT, -1) @ many(v)), (q, k, v), "attention")
    assert ran.only(SDPA).kwargs["enable_gqa"] is True


def test_repeated_tokens_are_not_taken_for_heads() -> None:
    """Dimension 1 of [B,T,H,D] holds tokens: repeating those is no grouping of heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v)

    ran = run(Formula(attend), heads(B, T, H, D), "attention")
    assert ran.only(SDPA).kwargs["enable_gqa"] is False


def softmax_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v


NEAR_MISSES: dict[str, tuple[Callable[..., object], str]] = {
    "softmax over queries": (lambda q, k, v: torch.softmax(q @ k.mT, 2) @ v, "dimension 2"),
    "weights returned": (lambda q, k, v: ((p := torch.softmax(q @ k.mT, -1)) @ v, p), "consumers"),
    "scores read twice": (lambda q, k, v: torch.softmax(s := q @ k.mT, -1) @ v + s.sum(), "consumers"),
    "mask scaled too": (lambda q, k, v: torch.softmax((q @ k.mT + v[..., :1].mT) * 0.5, -1) @ v, "scaled"),
    "float32 softmax": (softmax_in_float32, "narrower"),
    "weak fill": (lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(v[..., :1].mT > 0, -9.0), -1) @ v, "fills in"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay(case: str) -> None:
    formula, reason = NEAR_MISSES[case]
    ran = run(Formula(formula), heads(), "attention", tolerance=0.0)
    assert ran.changed == []
    assert any(reason in why for why in ran.refused)


def test_no_softmax_or_no_scores_is_no_attention() -> None:
    for formula in (lambda q, k, v: torch.sigmoid(q @ k.mT) @ v, lambda q, k, v: torch.softmax(q[..., :T], -1) @ v):
        ran = run(Formula(formula), heads(), "attention", tolerance=0.0)
        assert ran.changed == ran.refused == []


def test_a_write_in_between_is_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q + 1.0
        scores = q @ k.mT
        q.mul_(2.0)
        return torch.softmax(scores, -1) @ v + q.sum()

    ran = run(Formula(attend), heads(), "attention", tolerance=0.0)
    assert ran.changed == []
    assert any("writes" in why for why in ran.refused)


def test_float32_keeps_the_twofold_rule() -> None:
    attend = FORMS["divided"]
    exact = attend(*heads())
    q, k, v = (value.float() for value in heads())
    ran = run(Formula(attend), (q, k, v), "attention", tolerance=1e-5)
    plain, ours = (attend(q, k, v) - exact).abs().max(), (ran.graph.module(q, k, v) - exact).abs().max()
    assert ours <= 2 * plain + torch.finfo(torch.float32).eps
