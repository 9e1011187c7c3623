"""The acceptance rule against a loop that follows the paper word by word, and against the distribution it must keep."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.llm.sampling import BAD_ROW
from ridgeline.llm.speculate import accept, accept_batch
from tests.llm.speculate.support import SAMPLES, WRONG_RULES, chi_square, joint, sampled
from tests.support import full_or_tenth


def distribution(*shape: int, sharp: float = 1.5, zeros: bool = False) -> torch.Tensor:
    logits = torch.randn(*shape) * sharp
    if zeros:  # what top-k leaves
        logits = logits.masked_fill(torch.rand(*shape) < 0.4, -torch.inf)
        logits[..., 0] = logits[..., 0].clamp(min=-9)
    return logits.softmax(-1)


def invert(chances: list[float], number: float) -> int:
    """The token where the running sum passes number · total."""
    total, seen = math.fsum(chances), 0.0
    for token, chance in enumerate(chances):
        seen += chance
        if seen > number * total:
            return token
    return max(token for token, chance in enumerate(chances) if chance > 0)


def reference(target: list[list[float]], drafted: list[int], draft: list[list[float]] | None, uniforms: list[list[float]]) -> list[int]:
    """One request, one token after another."""
    output: list[int] = []
    for place, token in enumerate(drafted):
        p = target[place]
        q = draft[place] if draft is not None else [float(other == token) for other in range(len(p))]
        draw, test = uniforms[place]
        if draft is None:
            own = invert(p, draw)
            output.append(own)
            if own != token:
                return output
        elif q[token] * test < p[token]:
            output.append(token)
        else:
            return [*output, invert([max(0.0, ours - theirs) for ours, theirs in zip(p, q, strict=True)], draw)]
    return [*output, invert(target[len(drafted)], uniforms[len(drafted)][0])]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("with_draft", [False, True])
def test_batch_equals_the_loop(with_draft: bool, zeros: bool) -> None:
    """Ragged counts, any draft, tokens drawn from the draft or (without one) anything at all."""
    batch, width, vocab = full_or_tenth(2000), 4, 7
    target = distribution(batch, width + 1, vocab, sharp=4, zeros=zeros).double()
    draft = 0.8 * target[:, :width] + 0.2 * distribution(batch, width, vocab, zeros=zeros).double()
    drafted = torch.multinomial(draft.flatten(0, 1), 1).view(batch, width)
    counts = torch.randint(0, width + 1, (batch,))
    numbers = torch.rand(batch, width + 1, 2, dtype=torch.float64)
    tokens, emitted = accept_batch(target, drafted, counts, draft if with_draft else None, numbers[..., 0], numbers[:, :width, 1])
    lengths = set()
    for row in range(batch):
        size = int(counts[row])
        wanted = reference(
            target[row, : size + 1].tolist(), drafted[row, :size].tolist(), draft[row, :size].tolist() if with_draft else None,
            numbers[row].tolist(),
        )  # fmt: skip
        assert tokens[row, : emitted[row]].tolist() == wanted
        alone = accept(
            target[row, : size + 1], drafted[row, :size].tolist(), draft[row, :size] if with_draft else None, numbers[row, : size + 1]
        )
        assert alone == wanted
        lengths.add(len(wanted))
    assert lengths == {1, 2, 3, 4, 5}


@pytest.fixture
def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """A target and a draft over 6 tokens with known chances; the draft is the target mixed with another."""
    generator = torch.Generator().manual_seed(3)
    target = (torch.randn(7, 6, generator=generator) * 1.2).softmax(-1).double()
    other = (torch.randn(7, 6, generator=generator) * 1.2).softmax(-1).double()
    return target, 0.5 * target + 0.5 * other


@pytest.mark.parametrize("lookahead", [1, 2])
def test_output_follows_the_target(tables: tuple[torch.Tensor, torch.Tensor], lookahead: int) -> None:
    target, draft = tables
    counts, kept = sampled("exact", 4 * SAMPLES, target, draft, lookahead)
    assert 0.3 < kept < 0.9
    assert kept == pytest.approx(float(torch.minimum(target[0], draft[0]).sum()), abs=0.01)  # 1 - total variation: the most possible
    assert chi_square(counts, joint(target)) > 1e-3


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_wrong_rules_are_seen(tables: tuple[torch.Tensor, torch.Tensor], rule: str) -> None:
    target, draft = tables
    counts, _ = sampled(rule, SAMPLES, target, draft, 1)
    assert chi_square(counts, joint(target)) < 1e-3


def test_own_draws_do_not_depend_on_the_draft() -> None:
    """Without distributions the text is that of plain sampling, whatever was drafted."""
    target = distribution(300, 5, 9)
    draws = torch.rand(300, 5, dtype=torch.float64)
    counts = torch.full((300,), 4)
    bad, emitted_bad = accept_batch(target, torch.randint(0, 9, (300, 4)), counts, None, draws, None)
    good, emitted_good = accept_batch(target, bad[:, :4], counts, None, draws, None)
    assert torch.equal(bad, good)
    assert emitted_good.eq(5).all() and emitted_bad.float().mean() < 2


def test_a_perfect_draft_is_kept_whole() -> None:
    target = distribution(200, 5, 9)
    drafted = torch.multinomial(target[:, :4].flatten(0, 1), 1).view(200, 4)
    numbers = torch.rand(200, 5, dtype=torch.float64)
    _, emitted = accept_batch(target, drafted, torch.full((200,), 4), target[:, :4], numbers, numbers[:, :4])
    assert emitted.eq(5).all()


def test_a_row_without_a_distribution_ends_the_output() -> None:
    target = distribution(1, 3, 5)
    target[0, 1] = math.nan
    drafted = torch.tensor([[int(target[0, 0].argmax()), 2]])
    numbers = torch.full((1, 3), 1e-9, dtype=torch.float64)
    tokens, emitted = accept_batch(target, drafted, torch.tensor([2]), target[:, :2], numbers, numbers[:, :2])
    assert emitted.tolist() == [2] and tokens[0, :2].tolist() == [drafted[0, 0], BAD_ROW]
    certain = torch.zeros(1, 3, 5)
    certain[0, 0, 4] = 1
    certain[0, 1:] = math.nan
    tokens, emitted = accept_batch(certain, torch.tensor([[4, 4]]), torch.tensor([2]), None, numbers, None)
    assert emitted.tolist() == [2] and tokens[0, :2].tolist() == [4, BAD_ROW]
    broken = torch.full((1, 2, 5), math.nan)  # of the draft: never kept, and drawn from the target
    tokens, emitted = accept_batch(
        distribution(1, 3, 5), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), broken, numbers, numbers[:, :2]
    )
    assert emitted.tolist() == [1] and tokens[0, 0] >= 0
