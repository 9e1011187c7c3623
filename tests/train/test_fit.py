"""The loop against one written by hand in float64, and everything it must put back."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import DataError, OptionError, TrainError
from ridgeline.train.fit import fit
from ridgeline.train.flops import FlopCount
from ridgeline.train.freeze import frozen
from ridgeline.train.heads import Head
from ridgeline.train.history import History
from ridgeline.train.loss import cross_entropy
from ridgeline.train.optimiser import factor
from ridgeline.train.options import check_settings
from ridgeline.train.progress import Progress, line
from ridgeline.train.seeds import epoch_order, mix, step_generator
from ridgeline.workload.data import Data, Split

ROWS = 60


def problem(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).double()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def by_hand(model: nn.Module, data: tuple[Tensor, Tensor], steps: int, batch: int, **options: Any) -> nn.Module:
    """SGD with momentum, weight decay and clipping, written out; the schedule and the order are the run's."""
    settings = check_settings(steps=steps, batch=batch, **options)
    velocity: dict[nn.Parameter, Tensor] = {}
    each = len(data[0]) // batch
    for step in range(steps):
        rows = epoch_order(len(data[0]), settings.seed, step // each)[step % each * batch :][:batch]
        functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
        norm = torch.cat([g.reshape(-1) for g in gradients.values()]).norm()
        shrink = 1.0 if settings.clip is None else min(1.0, settings.clip / (float(norm) + 1e-6))
        rate = settings.learning_rate * factor(settings, step, steps)
        for parameter, gradient in gradients.items():
            slope = gradient * shrink + settings.weight_decay * parameter.detach()
            velocity[parameter] = slope if parameter not in velocity else settings.momentum * velocity[parameter] + slope
            push = slope + settings.momentum * velocity[parameter] if settings.nesterov else velocity[parameter]
            parameter.data.sub_(rate * push)
            parameter.grad = None
    return model


@pytest.mark.parametrize(
    "options", [{}, {"clip": 0.05, "nesterov": True, "schedule": "step", "weight_decay": 0.01}, {"warmup": 3, "seed": 9}]
)
def test_equals_the_loop_by_hand(options: dict[str, Any]) -> None:
    ours = net()
    history = fit(ours, problem(), steps=13, batch=16, progress=False, **options)
    torch.testing.assert_close(weights(ours), weights(by_hand(net(), problem(), 13, 16, **options)), rtol=1e-12, atol=1e-13)
    assert len(history) == 13 and history.steps_per_epoch == 3 and len(history.epochs) == 5


@pytest.mark.parametrize(("batch", "pieces"), [(16, 4), (20, 3), (7, 7)])
def test_accumulation_equals_the_large_batch(batch: int, pieces: int) -> None:
    whole, cut = net(), net()
    a = fit(whole, problem(), steps=9, batch=batch, progress=False)
    b = fit(cut, problem(), steps=9, batch=batch, accumulate=pieces, progress=False)
    torch.testing.assert_close(weights(whole), weights(cut), rtol=1e-12, atol=1e-13)
    assert a.loss == pytest.approx(b.loss, rel=1e-12)


def test_accumulation_is_exact_with_ignored_targets() -> None:
    """Pieces with few targets that count, or none, weigh as much as they hold."""
    inputs, targets = problem()
    targets = torch.where(inputs[:, 2] > 0.3, targets, -100)
    whole, cut = net(), net()
    a = fit(whole, (inputs, targets), steps=9, batch=12, progress=False)
    b = fit(cut, (inputs, targets), steps=9, batch=12, accumulate=5, progress=False)
    torch.testing.assert_close(weights(whole), weights(cut), rtol=1e-11, atol=1e-12)
    assert a.loss == pytest.approx(b.loss, rel=1e-11)


def test_accumulation_draws_the_same_dropout() -> None:
    runs = []
    for pieces in (1, 4):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        fit(model, problem(), steps=5, batch=16, accumulate=pieces, progress=False)
        runs.append(weights(model))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-12, atol=1e-13)


def test_same_seed_same_weights_other_seed_other_weights() -> None:
    results = []
    for seed in (0, 0, 1):
        model = net()
        torch.manual_seed(len(results))  # the caller's random state must not matter
        fit(model, problem(), steps=5, batch=16, seed=seed, progress=False)
        results.append(weights(model))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@given(rows=st.integers(1, 200), seed=st.integers(-(2**40), 2**40), epoch=st.integers(0, 10**6))
def test_an_epoch_takes_every_row_once(rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(rows, seed, epoch)
    assert torch.equal(order.sort().values, torch.arange(rows)) and torch.equal(order, epoch_order(rows, seed, epoch))


def test_epochs_take_the_rows_in_other_orders() -> None:
    orders = {tuple(epoch_order(20, 0, epoch).tolist()) for epoch in range(5)}
    assert len(orders) == 5


def test_seeds_do_not_collide() -> None:
    values = {mix(seed, stream, step) for seed in range(20) for stream in range(4) for step in range(200)}
    assert len(values) == 20 * 4 * 200 and all(0 <= value < 2**63 for value in values)
    drawn = torch.rand(3, generator=step_generator(0, 5))
    assert torch.equal(drawn, torch.rand(3, generator=step_generator(0, 5)))


def test_frozen_layers_stay_bit_by_bit() -> None:
    model = net(norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes: set[bool] = set()
    fit(model, problem(), steps=5, batch=16, freeze=("0.bias", "1"), progress=False, after_step=lambda m, s: modes.add(model[1].training))
    after = model.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert modes == {False} and model[1].training and all(parameter.requires_grad for parameter in model.parameters())


def test_a_frozen_norm_without_parameters_stays_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3)).double()
    fit(model, problem(), steps=3, batch=16, freeze="1", progress=False)
    assert model[1].running_mean is not None and not model[1].running_mean.any()


def test_tied_weights_and_shared_layers_are_frozen_by_either_name() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)).double()
    model[2].weight = model[0].weight
    model.append(nn.Softmax(-1)).append(model[1])
    for pattern in ("2", "2.weight", "0"):
        before = model[0].weight.detach().clone()
        fit(model, problem(), steps=2, batch=16, freeze=pattern, progress=False)
        assert torch.equal(model[2].weight, before) and model[2].weight.requires_grad
    shared = nn.ModuleDict({"first": (layer := nn.Linear(2, 2)), "second": layer})
    with frozen(shared, ["second"]):
        assert not layer.weight.requires_grad
    assert layer.weight.requires_grad


def test_an_unknown_pattern_names_the_nearest() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(6, 3)})
    with pytest.raises(OptionError, match=r"did you mean encoder"):
        fit(model, problem(), steps=1, freeze=("encodr",), progress=False)


class TwoHeads(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.form, self.body, self.label, self.value = form, nn.Linear(6, 8).double(), nn.Linear(8, 3).double(), nn.Linear(8, 1).double()

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.body(inputs).tanh()
        outputs = {"label": self.label(hidden), "value": self.value(hidden)}
        return outputs if self.form == "dict" else tuple(outputs.values())


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs.squeeze(-1), targets)


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_heads_are_weighted_each_with_its_loss_and_targets(form: str) -> None:
    inputs, labels = problem()
    targets = torch.stack([labels.double(), inputs.sum(1)], 1)
    heads = {
        "label": Head(1.0, targets=lambda t: t[:, 0].long()),
        "value": Head(0.3, loss=squared, targets=lambda t: t[:, 1]),
    }
    ours, theirs = TwoHeads(form), TwoHeads("tuple")

    def objective(model: nn.Module, batch: Tensor, wanted: Tensor) -> Tensor:
        label, value = theirs(batch)
        return functional.cross_entropy(label, wanted[:, 0].long()) + 0.3 * functional.mse_loss(value[:, 0], wanted[:, 1])

    fit(ours, (inputs, targets), heads=heads, steps=6, batch=16, progress=False)
    fit(theirs, (inputs, targets), objective=objective, steps=6, batch=16, progress=False)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-12, atol=1e-13)


def test_heads_by_a_mapping_of_losses() -> None:
    inputs, labels = problem()
    a, b = TwoHeads("dict"), TwoHeads("dict")
    fit(a, (inputs, labels), {"value": lambda o, t: squared(o, t.double())}, heads={"label": 1, "value": 0.3}, steps=3, progress=False)
    picked = {"label": Head(1.0), "value": Head(0.3, loss=lambda o, t: squared(o, t.double()))}
    fit(b, (inputs, labels), heads=picked, steps=3, progress=False)
    assert torch.equal(weights(a), weights(b))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"heads": {"labl": 1.0}}, TrainError, "did you mean label"),
        ({"heads": {}}, OptionError, "at least one"),
        ({"heads": {"label": -1.0}}, OptionError, "weight -1.0"),
        ({"heads": {"label": 1.0}, "loss": {"other": squared}}, OptionError, "'other'"),
        ({"loss": {"label": squared}}, OptionError, "without heads"),
    ],
)
def test_wrong_heads_are_named(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fit(TwoHeads("dict"), problem(), steps=1, progress=False, **options)


class Adapted(nn.Module):
    """An objective with a layer of its own, and a teacher that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.teacher = nn.Linear(3, 3).double(), net().requires_grad_(False)

    def forward(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(self.adapter(model(inputs)), self.teacher(inputs)) + cross_entropy(model(inputs), targets)


def test_an_objective_with_parameters_is_trained_along() -> None:
    objective, model = Adapted(), net()
    adapter, teacher = weights(objective.adapter), weights(objective.teacher)
    history = fit(model, problem(), objective=objective, steps=20, batch=30, progress=False)
    assert not torch.equal(adapter, weights(objective.adapter)) and torch.equal(teacher, weights(objective.teacher))
    assert history.loss[-1] < history.loss[0]


class Tokens(nn.Module):
    """Predicts the next token from the token and its position."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place, self.out = nn.Embedding(5, 8), nn.Embedding(4, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.out(self.token(ids) + self.place(positions))


def test_sequences_with_positions() -> None:
    ids = torch.randint(5, (80, 5), generator=torch.Generator().manual_seed(0))
    ids[:, 1:] = (ids[:, :1] + torch.arange(1, 5)) % 5  # each token follows from the one before
    history = fit(Tokens(), Split(ids[:, :-1], ids[:, 1:]), epochs=30, batch=20, learning_rate=0.5, progress=False)
    assert history.loss[-1] < 0.1 < history.loss[0]


def test_augment_and_prepare_of_a_data_set_are_used() -> None:
    inputs, targets = problem()
    seen: list[float] = []

    def augment(batch: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(float(torch.rand(1, generator=generator)))
        return batch

    split = Split((inputs * 100).to(torch.int64), targets)
    data = Data("mine", "image", 3, split, split, prepare=lambda batch: batch.double() / 100, augment=augment)
    fit(net(), data, steps=4, batch=30, progress=False)
    assert seen == [float(torch.rand(1, generator=step_generator(0, step))) for step in range(4)]
    fit(net(), data, steps=4, batch=30, augment=False, progress=False)
    assert len(seen) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    model = net(norm=True).eval()
    model[1].train()
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.manual_seed(11)
    wanted = torch.rand(2)
    torch.manual_seed(11)
    inside: list[Any] = []

    def look(inner: nn.Module, step: int) -> None:
        cuda = torch.backends.cuda
        inside.append(
            (inner.training, cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, cuda.flash_sdp_enabled(), cuda.math_sdp_enabled())
        )
        torch.rand(5)
        if fails:
            raise KeyError("planted")

    options: dict[str, Any] = {"steps": 2, "tf32": not flags[1], "attention": "math", "freeze": "0", "progress": False}
    if fails:
        with pytest.raises(KeyError, match="planted"):
            fit(model, problem(), after_step=look, **options)
    else:
        fit(model, problem(), after_step=look, **options)
    assert inside[0] == (True, flags[0], not flags[1], False, True)  # products have one setting for GPU and CPU: left alone on a CPU
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == flags and torch.backends.cuda.flash_sdp_enabled()
    assert torch.equal(torch.rand(2), wanted)
    assert not model.training and model[1].training and not model[0].training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_activation_checkpointing_changes_nothing() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    plain = nn.Sequential(nn.Sequential(*blocks), nn.Linear(6, 3)).double()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    fit(plain, problem(), steps=4, progress=False)
    first = weights(plain)
    plain.load_state_dict(start)
    fit(plain, problem(), steps=4, checkpoint_activations=True, progress=False)
    assert torch.equal(first, weights(plain))


def test_history_has_every_column_and_is_plain_json() -> None:
    history = fit(net(), problem(), epochs=2, batch=20, progress=False)
    stored = json.loads(json.dumps(history.to_json(), allow_nan=False))
    assert {len(column) for column in stored["columns"].values()} == {6} and len(stored["epochs"]) == 2
    assert all(seconds > 0 for name in ("forward_s", "backward_s", "optimiser_s", "step_s") for seconds in stored["columns"][name])
    assert sum(history.forward_s) + sum(history.backward_s) + sum(history.optimiser_s) <= sum(history.step_s)
    assert stored["columns"]["memory_bytes"] == [None] * 6 and history.samples_per_s > 0
    other = History(20, 3)
    other.load(stored)
    assert other.loss == history.loss and other.epochs == history.epochs


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_flops_of_attention_with_few_heads_of_keys(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if keys were repeated, also where torch's formula (before 2.13) refuses other than equal heads."""
    from torch.utils import flop_counter

    theirs = flop_counter.sdpa_flop_count

    def strict(query: Any, key: Any, value: Any) -> int:
        assert query[1] == key[1] == value[1]
        return int(theirs(query, key, value))

    monkeypatch.setattr(flop_counter, "sdpa_flop_count", strict)
    query, key = (torch.empty(2, heads, 8, 16, device="meta", dtype=torch.bfloat16) for heads in (6, 2))
    rest = {"flash": (0.0, True), "efficient": (None, True), "cudnn": (None, True, 0.0, True)}[kind]
    count = FlopCount(recomputes=False)
    with count.in_forward():
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")(query, key, key, *rest)
    assert count.total == 2 * 2 * 6 * 8 * 8 * (16 + 16)


def test_flops_are_counted_exactly_and_mfu_needs_a_peak() -> None:
    """Two layers, both products of each backward but the first layer's input gradient."""
    history = fit(net(), problem(), steps=2, batch=20, peak_flops=1e12, progress=False)
    forward, first = 2 * 20 * (6 * 8 + 8 * 3), 2 * 20 * 6 * 8
    assert history.flops_per_step == 3 * forward - first
    assert history.mfu == pytest.approx(history.flops_per_step * 2 / sum(history.step_s) / 1e12)
    assert "MFU" in line(history, 10)
    plain = fit(net(), problem(), steps=2, batch=20, progress=False)
    assert plain.flops_per_step is None and plain.mfu is None and "MFU" not in line(plain, 10)
    with pytest.raises(OptionError, match="peak_flops = -1"):
        fit(net(), problem(), steps=1, peak_flops=-1.0, progress=False)


def test_progress_is_a_line_now_and_then() -> None:
    history = History(10, 4, loss=[0.5] * 6, step_s=[0.5] * 6, skipped=[False] * 5 + [True])
    assert line(history, 8) == "epoch 2/2 ━━━━━━━━━━━━━━━─────  75% · loss 0.5000 · 20 samples/s · 1 skipped · 0:01 left"
    quiet = io.StringIO()
    bar = Progress(history, 8, quiet)
    bar.show()
    assert quiet.getvalue() == ""
    bar.show(last=True)
    assert quiet.getvalue().count("\n") == 1

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    live = Terminal()
    Progress(history, 8, live).show()
    assert live.getvalue().startswith("\repoch 2/2")


def test_reports_a_line_an_epoch_and_nothing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    fit(net(), problem(), epochs=3, batch=20, report=lines.append)
    captured = capsys.readouterr()
    assert [text.split(":")[0] for text in lines] == ["epoch 1", "epoch 2", "epoch 3"]
    assert captured.out == "" and captured.err.startswith("epoch 3/3")


def test_a_small_set_is_one_batch() -> None:
    history = fit(net(), problem(5), epochs=2, batch=128, progress=False)
    assert history.batch == 5 and len(history) == 2


@pytest.mark.parametrize(
    ("data", "options", "error", "says"),
    [
        ((torch.zeros(3, 6), torch.zeros(2)), {}, DataError, "3 inputs and 2 targets"),
        ((torch.zeros(0, 6), torch.zeros(0)), {}, DataError, "0 inputs"),
        (None, {"loss": lambda o, t: o.sum(1)}, TrainError, "shape"),
        (None, {"loss": lambda o, t: o.sum().detach()}, TrainError, "without a gradient"),
        (None, {"objective": lambda m, i, t: 1.0}, TrainError, "float"),
        (None, {"objective": lambda m, i, t: 1.0, "loss": squared}, OptionError, "replaces both"),
        (None, {"checkpoint_every": 5}, OptionError, "checkpoint="),
        ((torch.zeros(4, 6), torch.zeros(4, 2).long()), {}, DataError, "targets \\[4, 2\\]"),
    ],
)
def test_what_cannot_be_trained_is_said(data: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fit(net(), data or problem(), steps=1, progress=False, **options)


def test_smoothing_is_the_formula_and_ignored_targets_do_not_count() -> None:
    outputs = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 3, -100, 1, 2, -100])
    kept = targets != -100
    shares = 0.9 * functional.one_hot(targets[kept], 4).double() + 0.1 / 4
    wanted = -(shares * outputs[kept].log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(cross_entropy(outputs, targets, smoothing=0.1), wanted)
    mixed = torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(-1)
    wanted = -((0.9 * mixed + 0.1 / 4) * outputs.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(cross_entropy(outputs, mixed, smoothing=0.1), wanted)
