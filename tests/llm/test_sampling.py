"""Filters against a plain loop, random numbers against exact distributions, rows against their neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.llm.engine.request import Request
from ridgeline.llm.sampling import BAD_ROW, History, Sampler, Sampling, draw, logprobs_of, penalise, pick, probabilities, uniform, uniforms
from tests.support import full_or_tenth


def chi_square_limit(freedom: int) -> float:
    """The 99.9 % quantile (Wilson 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


def slow(logits: list[float], s: Sampling, history: History) -> list[float]:
    """The documented order, a token at a time, in float64."""
    x = list(logits)
    for token in range(len(x)):
        if token in history.prompt or token in history.output:
            x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
        count = list(history.output).count(token)
        x[token] -= s.frequency_penalty * count + s.presence_penalty * (count > 0)
    if s.greedy:
        return [1.0 if token == x.index(max(x)) else 0.0 for token in range(len(x))]
    x = [value / s.temperature for value in x]
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    order = order[: s.top_k or len(order)]
    weights = {token: math.exp(x[token] - x[order[0]]) for token in order}
    total, reached, kept = sum(weights.values()), 0.0, []
    for token in order:
        if kept and reached >= s.top_p * total and s.top_p < 1:
            break
        kept.append(token)
        reached += weights[token]
    kept = [token for token in kept if weights[token] >= s.min_p]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(x))]


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=10_000, top_p=0.8),
    Sampling(temperature=0.9, top_p=1e-9),
    Sampling(temperature=2.0, min_p=0.2),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=0.8, top_k=12, top_p=0.7, min_p=0.05, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3),
    Sampling(repetition_penalty=3.0, frequency_penalty=2.0),
]


def test_filters_equal_the_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(SETTINGS), 40, generator=generator)
    histories = [History([1, 2, 3], [3, 3, int(row.argmax())]) for row in logits]
    found = probabilities(logits, SETTINGS, histories)
    for row, (sampling, history) in enumerate(zip(SETTINGS, histories, strict=True)):
        expected = torch.tensor(slow(logits[row].double().tolist(), sampling, history))
        assert torch.allclose(found[row], expected.float(), atol=2e-6), sampling
        assert (found[row] > 0).equal(expected > 0), sampling


def test_ties_keep_the_lower_numbers() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert probabilities(logits, [Sampling(temperature=1.0, top_k=2)]).tolist() == [[0.0, 0.5, 0.5, 0.0, 0.0]]
    assert probabilities(logits, [Sampling(temperature=1.0, top_p=0.1)]).tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]
    assert draw(logits, [Sampling()], None).tolist() == [1]


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.tensor([[300.0, 299.0, -300.0]])
    for temperature in (1e-30, 1e-46, 5e-324):  # the last two are 0 in float32
        assert probabilities(logits, [Sampling(temperature=temperature)]).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("penalty", [1e-30, 1e-40, 1e-50, 5e-324, 100.0])
def test_no_penalty_takes_a_rows_distribution_away(penalty: float) -> None:
    logits = torch.tensor([[3e9, -3e9, 1.0, -math.inf]])
    history, random = [History([0, 1, 2, 3], [0])], torch.tensor([0.5], dtype=torch.float64)
    for temperature in (0.0, 0.7):
        setting = Sampling(temperature=temperature, repetition_penalty=penalty, frequency_penalty=-2.0)
        assert draw(logits, [setting], random, history).tolist() == [0]
    broken = torch.tensor([[math.inf, 0.0, 0.0, 0.0]])
    assert draw(broken, [Sampling(repetition_penalty=penalty)], None, history).tolist() == [BAD_ROW]  # nor gives it one


def test_presence_and_frequency_look_at_the_output_only() -> None:
    found = penalise(torch.zeros(1, 4), [Sampling(presence_penalty=0.25, frequency_penalty=0.5)], [History([0, 0, 1], [1, 2, 2])])
    assert found.tolist() == [[0.0, -0.75, -1.25, 0.0]]


def test_top_p_is_a_share_of_what_top_k_left_and_ends_where_it_is_reached() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (probabilities(logits, [Sampling(temperature=1.0, top_k=2, top_p=0.5)]) > 0).tolist() == [[True, False, False, False]]
    even = torch.zeros(1, 4)  # a quarter each, exactly
    assert probabilities(even, [Sampling(temperature=1.0, top_p=0.5)]).tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.6, top_k=9, top_p=0.9, min_p=0.02)])
def test_drawn_tokens_follow_the_distribution(sampling: Sampling) -> None:
    count = full_or_tenth(200_000)
    logits = 2 * torch.randn(1, 30, generator=torch.Generator().manual_seed(5))
    probs = probabilities(logits, [sampling])[0].double()
    drawn = pick(probs.expand(count, -1), torch.from_numpy(uniforms([99] * count, range(count))))
    seen = torch.bincount(drawn, minlength=30).double()
    assert seen[probs == 0].sum() == 0
    expected = probs[probs > 0] * count
    freedom = len(expected) - 1
    assert ((seen[probs > 0] - expected) ** 2 / expected).sum() < chi_square_limit(freedom)
    wrong = expected.flip(0)  # the test can fail: another order of the same numbers is rejected
    assert ((seen[probs > 0] - wrong) ** 2 / wrong).sum() > chi_square_limit(freedom)


def test_random_numbers_are_even_and_unrelated() -> None:
    count = full_or_tenth(400_000)
    by_position = uniforms([7] * count, range(count))
    by_seed = uniforms(range(count), [7] * count)
    other = uniforms([7] * count, range(count), stream=1)
    for numbers in (by_position, by_seed, other):
        assert numbers.min() > 0 and numbers.max() < 1
        seen = torch.histc(torch.from_numpy(numbers), 50, 0, 1)
        assert ((seen - count / 50) ** 2 / (count / 50)).sum() < chi_square_limit(49)
    for first, second in ((by_position[1:], by_position[:-1]), (by_position, by_seed), (by_position, other)):
        correlation = torch.corrcoef(torch.stack([torch.tensor(first), torch.tensor(second)]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(count)
    assert uniform(1, 2) != uniform(2, 1)  # seed and position don't change places
    assert uniform(-3, 5, 2) == uniforms([-3, 4], [5, 5], 2)[0] == uniform(2**64 - 3, 5, 2)


def test_rows_do_not_know_their_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(len(SETTINGS), 500, generator=generator)
    random = torch.rand(len(SETTINGS), generator=generator, dtype=torch.float64)
    histories = [History([1, 5], [5, 9])] * len(SETTINGS)
    together = draw(logits, SETTINGS, random, histories)
    for row in range(len(SETTINGS)):
        alone = draw(logits[row : row + 1], SETTINGS[row : row + 1], random[row : row + 1], histories[:1])
        assert alone[0] == together[row]
        one = probabilities(logits[row : row + 1], SETTINGS[row : row + 1], histories[:1])
        assert one[0].equal(probabilities(logits, SETTINGS, histories)[row])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8), Sampling(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1)])
def test_a_bad_row_spoils_only_itself(sampling: Sampling) -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    good = draw(logits, [sampling] * 5, torch.full((5,), 0.4))
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    logits[3, 3] = math.inf
    found = draw(logits, [sampling] * 5, torch.full((5,), 0.4))
    assert found.tolist() == [good[0], BAD_ROW, BAD_ROW, BAD_ROW, good[4]]
    assert logprobs_of(logits, found.tolist(), [1] * 5)[1] is None


def test_some_minus_infinity_is_fine() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0]])
    sampling = Sampling(temperature=1.0, repetition_penalty=2.0)
    assert probabilities(logits, [sampling], [History([0], [])]).tolist() == [[0.0, 0.5, 0.0, 0.5]]


def test_impossible_last_token_is_never_drawn() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0]])
    assert pick(probs, torch.tensor([math.nextafter(1, 0)], dtype=torch.float64)).tolist() == [1]
    assert pick(torch.tensor([[0.0, 1.0]]), torch.tensor([1e-300], dtype=torch.float64)).tolist() == [1]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    requests = [
        Request("a", [1], Sampling(temperature=9.0, top_k=1, logprobs=3, repetition_penalty=5.0, seed=1)),
        Request("b", [1], Sampling()),
    ]
    sampled = Sampler().sample(logits, requests)
    expected = logits[0].log_softmax(0)
    entry = sampled.logprobs[0]
    assert entry is not None and sampled.logprobs[1] is None
    assert entry.token == sampled.tokens[0]
    assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-6)
    assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("temperature", -0.1), ("temperature", math.nan), ("temperature", True), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.1), ("min_p", -1), ("repetition_penalty", 0.0), ("presence_penalty", math.inf), ("seed", 2**64),
        ("seed", 1.0), ("logprobs", -1), ("logprobs", 101), ("stop", "text"), ("stop", ("",)), ("stop_ids", (-1,)),
        ("frequency_penalty", "1"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"Sampling\.{name} = "):
        Sampling(**{name: value})  # type: ignore[arg-type]
