"""The report on nets whose gradients are known to the bit: counts by hand, errors by numpy's float16, scales by torch's GradScaler."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.core.errors import DataError, OptionError, TrainError
from ridgeline.train import spread
from ridgeline.train.history import History
from ridgeline.train.options import Scaling
from ridgeline.train.spread import Spread, Tally
from ridgeline.train.stability import StabilityReport, best_scale, replay_scaling, scale_history, stability_report
from ridgeline.workload.data import Data, Split

S = 2.0**16
EDGES = [
    0.0,
    2.0**-45,  # · 2^16 = 2^-29: underflow, flushed
    2.0**-41,  # 2^-25: half the least number, rounds to even, to zero
    1.5 * 2.0**-41,  # rounds up to 2^-24: underflow, but not flushed
    2.0**-40,  # 2^-24, the least number: subnormal
    -(2.0**-31),  # -2^-15: subnormal
    2.0**-30,  # 2^-14: the least normal
    65504.0 / S,  # the greatest
    65505.0 / S,  # overflow by definition, though the cast still rounds it down
    -2.0,  # 2^17: overflow
]


class Known(nn.Module):
    """Its weight's gradient is `gradient` times that of its output, which is the sum of the weight's share and x."""

    gradient: Tensor

    def __init__(self, gradient: list[float], output: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(gradient)))
        self.register_buffer("gradient", torch.tensor(gradient))
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        share = (self.weight * self.gradient).sum()
        return x + share - share.detach() + (self.output - x.detach())


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """The output's gradient is the target."""
    return (outputs * targets).sum()


def report(*layers: list[float], output: float = 1.0, target: float = 2.0**-10, scale: float = S, **options: object) -> StabilityReport:
    """The gradient of a weight is the number given, whatever the target: it is multiplied by its reciprocal, a power of two."""
    model = nn.Sequential(*(Known([value / target for value in layer], output) for layer in layers))
    return stability_report(model, [(torch.zeros(1), torch.full((1,), target))], summed, scale, **options)  # type: ignore[arg-type]


def test_counts_are_exact_on_known_extremes() -> None:
    found = report(EDGES, [2.0**-20, 0.0], scale=S)
    row, other = found.chosen("gradients")
    assert (row.layer, row.elements, row.zeros, row.nonfinite) == ("0", 10, 1, 0)
    assert (row.underflow, row.flushed, row.subnormal, row.overflow, row.nonzero) == (3, 2, 2, 2, 9)
    assert row.share(row.underflow) == 3 / 9 and (row.smallest, row.largest) == (2.0**-45, 2.0)
    assert row.exponents == {-45: 1, -41: 2, -40: 1, -31: 1, -30: 1, -1: 2, 1: 1} == exponents_by_hand(EDGES)
    assert row.error == math.inf and row.to_dict()["error"] is None
    assert (other.layer, other.exponents, other.error, other.underflow) == ("1", {-20: 1}, 0.0, 0)


def exponents_by_hand(values: list[float]) -> dict[int, int]:
    """Powers of two from the digits of the number's own hexadecimal form."""
    return dict(sorted(Counter(int(abs(value).hex().split("p")[1]) for value in values if value).items()))


def test_output_gradients_and_activations_are_the_layers_own() -> None:
    found = report([2.0**-20], [2.0**-22], output=300.0, target=2.0**-13)
    assert [(row.layer, row.largest, row.scale) for row in found.chosen("output_gradients")] == [("0", 2.0**-13, S), ("1", 2.0**-13, S)]
    assert [(row.layer, row.largest, row.scale) for row in found.chosen("activations")] == [("0", 300.0, 1.0), ("1", 300.0, 1.0)]
    weights = report([2.0**-20, 0.0], of=("gradients", "weights")).chosen("weights")
    assert [(row.elements, row.exponents, row.scale) for row in weights] == [(2, {0: 2}, 1.0)]


def test_batches_add_up() -> None:
    model = Known([2.0**-20, 0.0, 2.0**-44])
    pairs = [(torch.zeros(1), torch.full((1,), target)) for target in (1.0, 2.0, 0.5, 7.0)]
    row = stability_report(model, iter(pairs), summed, S, batches=3).chosen("gradients")[0]
    assert row.elements == 9 and row.zeros == 3 and row.exponents == {-20: 1, -19: 1, -21: 1, -44: 1, -43: 1, -45: 1}
    assert row.norm == pytest.approx(math.sqrt(sum((2.0**-20 * t) ** 2 + (2.0**-44 * t) ** 2 for t in (1, 2, 0.5))), rel=1e-14)


def tallied(values: Tensor, scale: float) -> Spread:
    tally = Tally(scale, values.device)
    tally.add(values)
    return tally.read("layer", "gradients")


@given(st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=40), st.integers(-20, 20))
def test_errors_equal_numpys_float16(values: list[float], power: int) -> None:
    scale = 2.0**power
    exact = numpy.array(values, dtype=numpy.float64)
    with numpy.errstate(over="ignore"):
        half = (exact * scale).astype(numpy.float32).astype(numpy.float16).astype(numpy.float64) / scale
    row = tallied(torch.tensor(values), scale)
    wanted = float(numpy.sqrt(numpy.sum((exact - half) ** 2)))
    assert row.error == pytest.approx(wanted, rel=1e-12, abs=0) if math.isfinite(wanted) else row.error == math.inf
    assert row.flushed == int(((half == 0) & (exact != 0)).sum())
    assert row.overflow == sum(abs(value) * scale > 65504 for value in values)
    assert row.underflow == sum(0 < abs(value) * scale < 2.0**-24 for value in values)
    assert row.subnormal == sum(2.0**-24 <= abs(value) * scale < 2.0**-14 for value in values)
    assert dict(row.exponents) == exponents_by_hand([float(numpy.float32(value)) for value in values])


def test_more_than_sixteen_million_are_counted_one_by_one() -> None:
    """A float32 counter stops at 2^24."""
    row = tallied(torch.tensor([2.0**-50]).expand(2**24 + 3), 1.0)
    assert row.elements == row.underflow == row.flushed == row.exponents[-50] == 2**24 + 3


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000) * 2.0 ** torch.randint(-40, 20, (1000,))
    whole = tallied(values, 1.0)
    monkeypatch.setitem(spread.CHUNK, "cpu", 7)
    parts = tallied(values, 1.0)
    assert parts.exponents == whole.exponents and parts.norm == pytest.approx(whole.norm, rel=1e-13)
    assert (parts.underflow, parts.overflow, parts.smallest, parts.largest) == (
        whole.underflow,
        whole.overflow,
        whole.smallest,
        whole.largest,
    )


def test_subnormal_and_infinite_float32_have_their_bins() -> None:
    row = tallied(torch.tensor([2.0**-149, 2.0**-126, 3.4e38, math.inf, math.nan, 0.0]), 1.0)
    assert row.exponents == {-149: 1, -126: 1, 127: 1} and (row.nonfinite, row.zeros) == (2, 1) and row.largest < math.inf


@given(st.floats(1e-40, 1e40), st.sampled_from([1.0, 1.5, 4.0, 8.0]))
def test_best_scale_is_the_largest_that_fits(largest: float, headroom: float) -> None:
    found = best_scale(largest, headroom)
    assert found is not None and math.frexp(found)[0] == 0.5
    assert found == 2.0**-126 or largest * headroom * found <= 65504
    assert found == 2.0**100 or largest * headroom * found * 2 > 65504


def test_best_scale_at_the_edge() -> None:
    assert best_scale(65504.0, 1.0) == 1.0 and best_scale(65505.0, 1.0) == 0.5 and best_scale(1.0, 4.0) == 2.0**13
    assert best_scale(0.0) is None and best_scale(math.inf) is None and best_scale(math.nan) is None and best_scale(5e-324) == 2.0**100
    with pytest.raises(OptionError, match=r"headroom = 0\.5"):
        best_scale(1.0, 0.5)


def test_the_report_names_the_best_scale_and_what_it_leaves() -> None:
    found = report([2.0**-10, 2.0**-40], scale=S)
    assert found.best_scale == 2.0**23 and found.underflow_remains == 0, "4 · 2^-10 · 2^23 = 2^15, twice that is over"
    wide = report([2.0**-10, 2.0**-50], [2.0**-49], scale=S)
    assert wide.underflow_remains == 2 and "2 gradient elements underflow there" in wide.table()
    assert report([2.0**-10], target=2.0**-2).best_scale == 2.0**15, "the gradient of an output is larger than any of a weight"


def test_scale_history_by_formula() -> None:
    past = scale_history([4.0, 2.0, 2.0, 8.0], [True, False, False, False])
    assert (past.overflow_rate, past.mean, past.variance) == (0.25, 4.0, 6.0)
    assert past.stability == pytest.approx(1 / (1 + 6 / 16)) and scale_history([2.0**16] * 5, [False] * 5).stability == 1.0
    for scales, skipped in (([], []), ([1.0], []), ([0.0], [False]), ([math.inf], [True]), ([None], [False])):
        with pytest.raises(TrainError, match="history of"):
            scale_history(scales, skipped)


@given(st.lists(st.sampled_from([0.25, 1.0, 3.0, 100.0, 1e5]), min_size=1, max_size=12), st.integers(1, 4), st.booleans())
def test_replay_is_what_torch_does(largest: list[float], interval: int, dynamic: bool) -> None:
    scaling = Scaling(initial=2.0**14, interval=interval, dynamic=dynamic)
    weight = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=interval)
    scales = []
    for value in largest:
        scale = scaler.get_scale()
        scales.append(scale)
        scaler.scale(torch.zeros(()))
        weight.grad = torch.tensor([value * scale]).half().float()
        scaler.step(optimiser)
        scaler.update(None if dynamic else 2.0**14)
    past = replay_scaling(largest, scaling)
    assert list(past.scales) == scales
    assert list(past.skipped) == [value * scale > 65504 for value, scale in zip(largest, scales, strict=True)]


def test_history_is_replayed_or_the_runs_own() -> None:
    found = report([2.0], [2.0**-3])
    assert found.replayed and found.history.overflow_rate == 1.0 and found.history.scales == (S,)
    run = History(4, 1, scale=[4.0, 2.0], skipped=[True, False], loss=[1.0, 1.0])
    assert report([1.0], history=run).history == scale_history([4.0, 2.0], [True, False])
    with pytest.raises(TrainError, match="float16 run"):
        report([1.0], history=History(4, 1, scale=[None], skipped=[False], loss=[1.0]))


@pytest.mark.parametrize(
    ("gradient", "output", "verdict", "says"),
    [
        ([2.0**-10, 1.0009765625 * 2.0**-12], 1.0, "float16", r"at scale 2\^23 float16 turns 0\.00% of the weights' gradients to zero"),
        ([2.0**-10], 70_000.0, "bfloat16", r"activations of 0 reach 7e\+04"),
        ([1.0] + [2.0**-45] * 30, 1.0, "bfloat16", r"96\.77% of the weights' gradients to zero.*more than 1%"),
        ([math.nan, 1.0], 1.0, "float32", "not finite in float32 already"),
        ([0.0, 0.0], 1.0, "undecided", "every gradient of the weights is zero"),
    ],
)
def test_verdict_and_its_numbers(gradient: list[float], output: float, verdict: str, says: str) -> None:
    found = report(gradient, output=output)
    assert found.verdict == verdict and re.search(says, found.reason), found.reason


def test_rounding_alone_speaks_for_float16() -> None:
    """1 + 2^-10 is a float16 and not a bfloat16."""
    row = report([1.0 + 2.0**-10], scale=2.0).chosen("gradients")[0]
    assert row.error == 0.0 and row.bfloat16_error == 2.0**-10 and row.bfloat16_relative_error == 2.0**-10 / (1 + 2.0**-10)


def digits_like() -> tuple[nn.Module, Data]:
    images, labels = torch.randint(256, (64, 1, 4, 4), dtype=torch.uint8), torch.randint(3, (64,))
    split = Split(images, labels)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(), nn.Linear(16, 3))
    return net, Data("made", "image", 3, split, split, prepare=lambda x: x.float() / 255)


def test_a_real_net_is_left_as_it_was_and_agrees_with_autograd() -> None:
    model, data = digits_like()
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    random = torch.rand(3)
    torch.manual_seed(1)
    found = stability_report(model, data, batches=2, batch=32)
    assert torch.equal(torch.rand(3), random), "the caller's random numbers go on"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.training and all(p.grad is None for p in model.parameters()) and not model[0]._forward_hooks
    assert [row.layer for row in found.chosen("gradients")] == ["0", "1", "5"] and len(found.chosen("activations")) == 6
    assert [row.elements for row in found.chosen("gradients")] == [2 * 40, 2 * 8, 2 * 51]
    assert found.verdict == "float16" and found.to_json() == json.loads(json.dumps(found.to_json(), allow_nan=False))
    lines = found.table().splitlines()
    assert len(lines) == 2 + len(found.rows) + 3 and len({len(line) for line in lines[1 : 2 + len(found.rows)]}) == 1


def test_dropout_draws_by_the_seed_alone() -> None:
    """A norm does not depend on the scale, so any difference would be another draw."""
    model, data = digits_like()
    norms = []
    for caller, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(caller)
        found = stability_report(model, data, scale=8.0, batches=2, seed=seed)
        assert found.best_scale != 8.0 and [row.norm for row in found.rows] == [row.norm for row in found.best_rows]
        norms.append([row.norm for row in found.rows])
    assert norms[0] == norms[1] != norms[2]


def test_half_precision_models_are_judged_by_their_float32_gradients() -> None:
    model, data = digits_like()
    model[4].p = 0.0
    rows = [stability_report(copy, data, batches=1).chosen("gradients") for copy in (model, model.to(torch.bfloat16))]
    assert model[0].weight.dtype == torch.bfloat16
    assert all(row.bfloat16_relative_error > 1e-4 for row in rows[1]), "a gradient computed in bfloat16 would have no error in it"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"scale": 0.0}, OptionError, "scale = 0"),
        ({"scale": math.inf}, OptionError, "scale = inf"),
        ({"batches": 0}, OptionError, "batches = 0"),
        ({"of": ("gradient",)}, OptionError, "gradient"),
        ({"of": ("activations",)}, OptionError, "it is gradients and any of"),
        ({"headroom": math.nan}, OptionError, "headroom = nan"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        report([1.0], **options)  # type: ignore[arg-type]


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(DataError, match="no batch"):
        stability_report(Known([1.0]), [], summed)
    model = Known([1.0]).requires_grad_(False)
    with pytest.raises(TrainError, match="no gradient"):
        stability_report(model, [(torch.zeros(1, requires_grad=False), torch.ones(1))], lambda o, t: (o * t).sum().requires_grad_())
