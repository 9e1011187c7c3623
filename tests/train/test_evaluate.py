"""Scores against sums written out by hand in float64, whatever the batch size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.core.errors import DataError, OptionError
from ridgeline.train.evaluate import Scores, evaluate
from ridgeline.workload.data import Data, Split
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig


class Table(nn.Module):
    """Row number in, that row of logits out: the same bits whatever the batch."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, rows: Tensor) -> Tensor:
        return self.logits[rows]


def by_hand(logits: Tensor, targets: Tensor, reference: Tensor | None = None) -> tuple[int, int, float, float]:
    """(count, correct, nll, KL) one target after another, in Python floats."""
    count = correct = 0
    nll = kl = 0.0
    others = (reference if reference is not None else logits).reshape(-1, logits.shape[-1]).tolist()
    for row, target, other in zip(logits.reshape(-1, logits.shape[-1]).tolist(), targets.reshape(-1).tolist(), others, strict=True):
        if target == -100:
            continue
        total, other_total = math.fsum(map(math.exp, row)), math.fsum(map(math.exp, other))
        count += 1
        correct += row.index(max(row)) == target
        nll -= row[target] - math.log(total)
        kl += math.fsum(
            math.exp(o) / other_total * ((o - math.log(other_total)) - (m - math.log(total))) for m, o in zip(row, other, strict=True)
        )
    return count, correct, nll, kl


@given(
    rows=st.integers(1, 23),
    classes=st.integers(2, 7),
    batch=st.integers(1, 30),
    tokens=st.none() | st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_scores_equal_sums_by_hand(rows: int, classes: int, batch: int, tokens: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    shape = (rows,) if tokens is None else (rows, tokens)
    logits, other = 3 * torch.randn(*shape, classes), 3 * torch.randn(*shape, classes)
    targets = torch.randint(classes, shape)
    targets[torch.rand(shape) < 0.3] = -100
    targets.view(-1)[0] = 1
    split = Split(torch.arange(rows), targets, text_bytes=41)
    scores = evaluate(Table(logits), split, batch=batch, reference=Table(other))
    count, correct, nll, kl = by_hand(logits, targets, other)
    assert (scores.count, scores.correct) == (count, correct)
    assert scores.loss == pytest.approx(nll / count, rel=1e-12)
    assert scores.perplexity == pytest.approx(math.exp(nll / count), rel=1e-12)
    assert scores.perplexity_per_byte == pytest.approx(math.exp(nll / 41), rel=1e-12)
    assert scores.kl == pytest.approx(kl / count, rel=1e-9, abs=1e-12)
    assert scores.accuracy == correct / count


def test_large_vocabularies_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.randn(50, 9), torch.randint(9, (50,))
    split = Split(torch.arange(50), targets)
    whole = evaluate(Table(logits), split)
    monkeypatch.setattr("ridgeline.train.evaluate.CHUNK_BYTES", 9 * 8 * 7)
    parts = evaluate(Table(logits), split)
    assert parts.correct == whole.correct and parts.nll_sum == pytest.approx(whole.nll_sum, rel=1e-14)


def test_float64_keeps_what_float32_would_lose() -> None:
    """A million targets of almost no loss: float32 sums would stop growing."""
    logits = torch.tensor([[0.0, -13.0]])
    scores = evaluate(Table(logits), Split(torch.zeros(200_000, dtype=torch.int64), torch.zeros(200_000, dtype=torch.int64)), batch=50_000)
    assert scores.loss == pytest.approx(math.log1p(math.exp(-13.0)), rel=1e-9)


class Mixed(nn.Module):
    """Notes which modes it was called in."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.drop, self.linear = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training or self.frozen.training or self.drop.training or torch.is_grad_enabled())
        out: Tensor = self.linear(self.drop(self.frozen(x)))
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_every_mode_comes_back(fails: bool) -> None:
    model = Mixed().train()
    model.frozen.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    targets = torch.tensor([0, 1, 2, 9 if fails else 0])
    if fails:
        with pytest.raises(DataError, match="target 9 with 3 logits"):
            evaluate(model, Split(torch.randn(4, 4), targets))
    else:
        evaluate(model, Split(torch.randn(4, 4), targets))
    assert model.modes == [False] and [model.training, model.frozen.training, model.drop.training] == [True, False, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_decoder_gets_its_positions() -> None:
    model = CausalLM(DecoderConfig(1, 16, 32, 2, 1, 11, 1e4)).eval()
    ids = torch.randint(11, (5, 7))
    split = Split(ids[:, :-1], ids[:, 1:], text_bytes=60)
    with torch.no_grad():
        logits = model(ids[:, :-1], torch.arange(6))
    count, correct, nll, _ = by_hand(logits, ids[:, 1:])
    scores = evaluate(model, split, batch=2, reference=model)
    assert (scores.count, scores.correct) == (count, correct) == (30, correct)
    assert scores.loss == pytest.approx(nll / count, rel=1e-5) and scores.kl == 0.0
    assert scores.perplexity_per_byte == pytest.approx(math.exp(nll / 60), rel=1e-5)


def test_data_is_prepared_and_cast_to_the_models_dtype() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).to(torch.bfloat16)
    images, targets = torch.randint(256, (6, 1, 2, 2), dtype=torch.uint8), torch.randint(3, (6,))
    split = Split(images, targets)
    data = Data("made", "image", 3, split, split, prepare=lambda x: x.float() / 255)
    with torch.no_grad():
        logits = model((images.float() / 255).to(torch.bfloat16)).float()
    assert evaluate(model, data).loss == pytest.approx(by_hand(logits, targets)[2] / 6, rel=1e-9)


def test_limit_scores_the_first_rows_and_does_not_guess_bytes() -> None:
    logits, targets = torch.randn(9, 3), torch.randint(3, (9,))
    scores = evaluate(Table(logits), Split(torch.arange(9), targets, text_bytes=20), limit=4, batch=3)
    assert scores.count == 4 and scores.nll_sum == pytest.approx(by_hand(logits[:4], targets[:4])[2], rel=1e-12)
    assert scores.perplexity_per_byte is None and "perplexity_per_byte" not in scores.to_dict() and "kl" not in scores.to_dict()
    assert evaluate(Table(logits), Split(torch.arange(9), targets, text_bytes=20), limit=99).perplexity_per_byte is not None


def test_masked_and_broken_logits() -> None:
    """-inf masks a class: no NaN in the KL. A NaN row is wrong, whatever its target."""
    masked = torch.tensor([[0.0, 1.0, -math.inf]])
    one = Split(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    scores = evaluate(Table(masked), one, reference=Table(masked))
    assert scores.kl == 0.0 and scores.accuracy == 1.0
    assert evaluate(Table(torch.zeros(1, 3)), one, reference=Table(masked)).kl == pytest.approx(kl_masked())
    assert evaluate(Table(masked), one, reference=Table(torch.zeros(1, 3))).kl == math.inf
    broken = evaluate(Table(torch.tensor([[0.0, math.nan, 0.0]])), one)
    assert broken.accuracy == 0.0 and math.isnan(broken.loss) and math.isnan(broken.perplexity)


def kl_masked() -> float:
    """KL of (σ(0,1), 0) against a third each."""
    total = 1 + math.e
    return sum(p * math.log(p * 3) for p in (1 / total, math.e / total))


def test_huge_losses_read_infinite_and_not_as_an_error() -> None:
    assert Scores(1, 0, 1e4).perplexity == math.inf
    assert Scores(2, 1, math.log(4.0)).to_dict() == {"accuracy": 0.5, "loss": math.log(2), "perplexity": pytest.approx(2.0), "count": 2}


class Heads(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x, "b": -x}


def test_one_of_several_heads() -> None:
    logits, targets = torch.randn(8, 3), torch.randint(3, (8,))
    split = Split(logits, targets)
    assert evaluate(Heads(), split, head="b").nll_sum == pytest.approx(by_hand(-logits, targets)[2], rel=1e-9)
    with pytest.raises(OptionError, match="outputs are \\['a', 'b'\\]"):
        evaluate(Heads(), split, head="c")
    with pytest.raises(OptionError, match="head="):
        evaluate(Heads(), split)


ROWS = torch.arange(4)
LABELS = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("split", "options", "error", "says"),
    [
        (Split(ROWS, torch.tensor([0, 1, -1, 0])), {}, DataError, "target -1"),
        (Split(ROWS, torch.full((4,), -100)), {}, DataError, "no target to score"),
        (Split(ROWS, LABELS.float()), {}, DataError, "torch.float32"),
        (Split(ROWS, LABELS[:, None]), {}, DataError, "for targets"),
        (Split(ROWS[:3], LABELS), {}, DataError, "3 inputs and 4 targets"),
        (Split(ROWS[:0], LABELS[:0]), {}, DataError, "0 inputs"),
        (Split(ROWS, LABELS), {"batch": 0}, OptionError, "batch = 0"),
        (Split(ROWS, LABELS), {"limit": 0}, OptionError, "limit = 0"),
        (Split(ROWS, LABELS), {"reference": Table(torch.zeros(4, 5))}, DataError, "alike"),
    ],
)
def test_bad_input_is_named(split: Split, options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        evaluate(Table(torch.zeros(4, 3)), split, **options)  # type: ignore[arg-type]
