"""Low rank over whole models: which layers, what budget, what is saved, and training back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError, TransformError
from ridgeline.train.evaluate import evaluate
from ridgeline.train.fit import fit
from ridgeline.transform.factor.step import LowRankSettings, low_rank, select
from ridgeline.transform.saved import load_model, save_model
from ridgeline.transform.step import Context, find_step, run_step
from ridgeline.workload.data import Data, Split
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig


class Net(nn.Module):
    """Convolutions of several kinds and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, stride=2)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU())
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.hidden, self.head = nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.depthwise(self.body(self.stem(x).relu())).mean((2, 3))).relu())


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def some_data(rows: int = 96) -> Data:
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(rows, 3, 8, 8, generator=random), torch.randint(5, (rows,), generator=random)
    inputs += targets[:, None, None, None] * 0.5
    return Data("some", "image", 5, Split(inputs, targets), Split(inputs, targets))


INPUTS = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(9)),)


@pytest.mark.parametrize("method", ["svd", "asvd", "tucker", "cp", "separable"])
def test_every_method_gives_a_smaller_model_that_saves_and_loads(method: str, tmp_path: Path) -> None:
    model = net()
    before = [p.clone() for p in model.parameters()]
    made, change = low_rank(model, method=method, energy=0.6, data=some_data(), inputs=INPUTS, latency=False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the user's model is not touched"
    assert change.after.bytes_on_disk < change.before.bytes_on_disk
    assert change.after.parameters == sum(p.numel() for p in made.parameters())
    rows = {row["layer"]: row for row in change.details["layers"]}
    assert "nothing to factor" in rows["depthwise"]["left"]
    assert all(row["energy"] >= 0.6 - 1e-6 for row in rows.values() if "energy" in row)
    assert made(*INPUTS).shape == (2, 5)
    save_model(made, tmp_path / "model", base=Net)
    loaded = load_model(tmp_path / "model", base=Net)
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert torch.allclose(loaded(*INPUTS), made(*INPUTS), atol=1e-6)


@pytest.mark.parametrize("budget", ["parameters", "flops"])
@pytest.mark.parametrize("ratio", [0.3, 0.6])
def test_a_ratio_is_kept_over_all_layers_together(budget: str, ratio: float) -> None:
    model = net()
    made, change = low_rank(model, ratio=ratio, budget=budget, inputs=INPUTS, latency=False)
    layers, _ = select(model, LowRankSettings())
    if budget == "parameters":
        cost = sum(made.get_submodule(name).weight.numel() if isinstance(made.get_submodule(name), nn.Linear | nn.Conv2d)
                   else sum(piece.weight.numel() for piece in made.get_submodule(name)) for name in layers)  # fmt: skip
        whole = sum(layer.weight.numel() for layer in layers.values())
    else:
        cost, whole = (_flops(one) - _fixed() for one in (made, model))
    assert 0.8 * ratio * whole < cost <= ratio * whole
    assert change.name == f"low rank svd {100 * ratio:g} % of {budget}"


def _flops(model: nn.Module) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*INPUTS)
    return int(counter.get_total_flops()) // 2


def _fixed() -> int:
    """Multiply-adds of the depthwise convolution, which no method takes: 2 images of 4x4 positions."""
    return 2 * 16 * 32 * 9


def test_a_whole_budget_beats_the_same_share_for_each_layer() -> None:
    """One layer of rank 2 and one with a flat spectrum: a shared budget spends where it helps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(32, 2) @ torch.randn(2, 32))
        model[1].weight.copy_(torch.linalg.qr(torch.randn(32, 32))[0])
    done = run_step(model, LowRankSettings(ratio=0.5), Context())
    ranks = {row["layer"]: row["ranks"][0] for row in done.details["layers"]}
    assert ranks["0"] == 2 and ranks["1"] > 8  # half of each alone would be rank 8
    assert sum(row["energy"] for row in done.details["layers"]) > 1.0 + 8 / 32


def test_activation_aware_has_the_smaller_output_error() -> None:
    model, data = net(), some_data()
    with torch.no_grad():
        wanted = model(data.train.inputs)
        errors = {}
        for method in ("svd", "asvd"):
            made, _ = low_rank(model, method=method, ratio=0.4, data=data, latency=False)
            errors[method] = (made(data.train.inputs) - wanted).norm().item()
    assert errors["asvd"] < 0.7 * errors["svd"]


def test_training_back_is_taught_by_the_original() -> None:
    model, data = net(), some_data()
    fit(model, data, epochs=30, batch=32, learning_rate=0.02, progress=False)
    rough, _ = low_rank(model, method="separable", rank=1, data=data, latency=False)
    taught, change = low_rank(model, method="separable", rank=1, data=data, latency=False, epochs=20, batch=32, learning_rate=0.01)
    before, after = (evaluate(one, data, reference=model).kl for one in (rough, taught))
    assert before is not None and after is not None and after < 0.5 * before
    assert any("trained 20 epochs against the original" in note for note in change.notes)
    assert [type(part) for part in taught.stem] == [nn.Conv2d, nn.Conv2d] and taught.stem[0].groups == 3


def test_shared_and_fused_layers_are_left_and_said_so() -> None:
    tied = CausalLM(DecoderConfig(2, 32, 64, 4, 2, 17, 1e4, tied=True))
    taken, left = select(tied, LowRankSettings())
    assert left == {"lm_head": "its weight is shared"} and len(taken) == 2 * 7
    made = run_step(tied, LowRankSettings(rank=2), Context()).model
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made(torch.arange(5)[None], torch.arange(5)).shape == (1, 5, 17)
    fused = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 16))
    taken, left = select(fused, LowRankSettings())
    assert list(taken) == ["1"] and set(left.values()) == {"it is a part of a fused torch layer"}
    twice = nn.Linear(8, 8)
    assert not select(nn.Sequential(twice, twice), LowRankSettings())[0]


def test_include_and_skip_choose_by_pattern() -> None:
    made = run_step(net(), LowRankSettings(rank=2, include=("body.*", "head"), skip=("body.2",)), Context()).model
    assert isinstance(made.body[0], nn.Sequential) and isinstance(made.head, nn.Sequential)
    assert isinstance(made.body[2], nn.Conv2d) and isinstance(made.hidden, nn.Linear)
    with pytest.raises(TransformError, match=r"no layer matches 'boddy\.2'(.|\n)*body\.2"):
        run_step(net(), LowRankSettings(rank=2, skip=("boddy.2",)), Context())


def test_layers_that_would_save_nothing_are_left_with_a_note() -> None:
    done = run_step(net(), LowRankSettings(rank=8), Context())
    left = {row["layer"]: row["left"] for row in done.details["layers"] if "left" in row}
    assert left["head"] == "rank 8 saves nothing"  # 64·5 / 69 = 4.6
    assert isinstance(done.model.head, nn.Linear) and isinstance(done.model.hidden, nn.Sequential)
    assert any("rank 8 saves nothing" in note for note in done.notes)
    with pytest.raises(TransformError, match="low rank of model"):
        run_step(net(), LowRankSettings(energy=1.0), Context())
    with pytest.raises(TransformError, match="low rank of model"):
        run_step(nn.Sequential(nn.ReLU(), nn.Embedding(3, 3)), LowRankSettings(), Context())


def test_the_error_names_the_layer() -> None:
    model = net()
    with torch.no_grad():
        model.body[2].weight[0] = torch.nan
    with pytest.raises(TransformError, match=r"body\.2: a weight that is not finite"):
        run_step(model, LowRankSettings(), Context())


def test_settings_are_checked_and_the_step_is_registered() -> None:
    assert find_step("low_rank")[0] is LowRankSettings
    for wrong, match in (
        ({"energy": 1.5}, "energy = 1.5"),
        ({"energy": 0.9, "rank": 3}, "one of energy, ratio and rank"),
        ({"method": "qr"}, "method = 'qr'"),
        ({"rang": 3}, "did you mean rank"),
    ):
        with pytest.raises(OptionError, match=match):
            low_rank(net(), **wrong)
    with pytest.raises(TransformError, match="without data"):
        low_rank(net(), method="asvd", energy=0.5)
    with pytest.raises(TransformError, match="without data"):
        low_rank(net(), ratio=0.5, budget="flops")
