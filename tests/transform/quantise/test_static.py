"""Static int8 of whole models: links change nothing, what cannot be quantised is left and said."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import DataError, ModelFileError, TransformError
from ridgeline.train.evaluate import evaluate
from ridgeline.transform.quantise import static
from ridgeline.transform.quantise.int8_layers import Int8Conv2d, Int8Layer, Int8Linear
from ridgeline.transform.quantise.static import bits_for, calibrate, candidates, link_, quantise_static_
from ridgeline.transform.saved import stored_bytes
from ridgeline.workload.data import load_data
from ridgeline.workload.models.cifar_resnet import CifarResNet
from ridgeline.workload.pretrained import load_pretrained


class Block(nn.Module):
    """conv-norm-relu-conv-norm, a residual sum, a pool and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(x + self.bn2(self.conv2(x)))
        x = self.conv3(x).mean((2, 3))
        return self.fc2(functional.relu(self.fc1(x)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = Block()
    made.train()
    made(torch.randn(64, 3, 8, 8))
    return made.eval()


@pytest.fixture
def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]


def test_rows_links_and_folds(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    rows, notes = quantise_static_(model, batches)
    assert [row.name for row in rows] == ["conv1", "conv2", "conv3", "fc1", "fc2"]
    # conv1's value is also the residual; conv2 meets the sum; conv3 the mean
    assert {row.name for row in rows if row.gives_codes} == {"fc1"}
    assert all(row.bits == 8 and row.sqnr_db > 38 for row in rows)
    assert "2 batch norms folded, 1 of 5 layers hand on codes" in notes
    assert isinstance(model.bn1, nn.Identity) and isinstance(model.conv1, Int8Conv2d) and isinstance(model.fc1, Int8Linear)


def test_answers_are_close_and_worse_with_fewer_bits(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    x = batches[0][0]
    with torch.no_grad():
        wanted = model(x)
        off = []
        for bits in (8, 6, 4, 2):
            narrow = copy.deepcopy(model)
            quantise_static_(narrow, batches, bits=bits)
            off.append(float((narrow(x) - wanted).norm() / wanted.norm()))
    assert off[0] < 0.02 and off == sorted(off)


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse", "entropy"])
def test_every_calibration_serves(model: nn.Module, batches: list[tuple[Tensor]], method: str) -> None:
    wanted = model(batches[0][0])
    rows, _ = quantise_static_(model, batches, method=method)  # type: ignore[arg-type]
    assert (model(batches[0][0]) - wanted).norm() / wanted.norm() < 0.05
    for row in rows:
        assert row.low is not None and row.high is not None and row.seen_high is not None
        assert row.high <= row.seen_high * 1.01 + 1e-6


def test_links_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes handed on are what the next layer would have made of the floats, ReLU and all."""
    torch.manual_seed(1)
    model = CifarResNet(1).eval()
    batches = [(torch.randn(8, 3, 16, 16),)]
    linked, alone = copy.deepcopy(model), copy.deepcopy(model)
    quantise_static_(linked, batches)
    monkeypatch.setattr(static, "link_", lambda model: {})
    quantise_static_(alone, batches)
    givers = [name for name, one in linked.named_modules() if isinstance(one, Int8Layer) and one.exit is not None]
    assert givers == ["layer1.0.conv1", "layer2.0.conv1", "layer3.0.conv1"]
    assert not any(one.exit for one in alone.modules() if isinstance(one, Int8Layer))
    x = torch.randn(4, 3, 16, 16)
    assert torch.equal(linked(x), alone(x))


def test_a_link_needs_a_single_reader_and_a_single_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.a(x))
            return self.b(y) + self.c(self.c(y))

    model = Twice().eval()
    rows, _ = quantise_static_(model, [(torch.randn(8, 4),)])
    assert not any(row.gives_codes for row in rows)
    assert link_(model) == {}


def test_other_functions_between_layers_end_a_link() -> None:
    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(nn.functional.relu6(self.b(nn.functional.gelu(self.a(x)))))

    rows, _ = quantise_static_(Gelu().eval(), [(torch.randn(8, 4),)])
    assert not any(row.gives_codes for row in rows)


def test_shared_layers_are_quantised_once_and_tied_weights_left() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mid, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.table.weight
            self.again = self.mid

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.again(self.mid(self.table(x))))

    model = Tied().eval()
    rows, notes = quantise_static_(model, [(torch.arange(6),)])
    assert [row.name for row in rows] == ["mid"] and model.again is model.mid and isinstance(model.mid, Int8Linear)
    assert any("head" in note and "shares its weight" in note for note in notes)


def test_what_has_no_integer_form_is_left_and_said() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.ConvTranspose2d(2, 2, 1), nn.Conv2d(2, 2, 2, padding="same"),
        nn.Flatten(), nn.Linear(32, 2),
    ).eval()  # fmt: skip
    rows, notes = quantise_static_(model, [(torch.randn(2, 1, 4, 4),)])
    assert [row.name for row in rows] == ["4"]
    for word in ("circular", "ConvTranspose2d", "not the same on both sides"):
        assert any(word in note for note in notes), word


def test_skip_and_bits_by_pattern(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    rows, notes = quantise_static_(model, batches, skip=["fc*"], bits=4, layer_bits={"conv1": 8, "conv*": 5})
    assert {row.name: row.bits for row in rows} == {"conv1": 8, "conv2": 5, "conv3": 5}
    assert any(note.startswith("fc1 stays") for note in notes)
    assert bits_for("fc", 3, {"conv*": 8}) == 3


def test_bad_requests_are_clear(model: nn.Module) -> None:
    with pytest.raises(TransformError, match="convv"):
        candidates(model, ["convv*"])
    with pytest.raises(TransformError, match="no layer to quantise"):
        candidates(nn.Sequential(nn.ReLU()))
    with pytest.raises(TransformError, match="one layer"):
        quantise_static_(nn.Linear(2, 2), [(torch.randn(1, 2),)])
    broken = copy.deepcopy(model)
    broken.conv3.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(TransformError, match=r"fc1|conv3"):
        quantise_static_(broken, [(torch.randn(2, 3, 8, 8),)])
    with pytest.raises(TransformError, match=r"conv1.*NaN"):
        quantise_static_(copy.deepcopy(model), [(torch.full((1, 3, 8, 8), torch.nan),)])


def test_a_layer_calibration_does_not_reach_is_an_error() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(TransformError, match="idle"):
        quantise_static_(Idle().eval(), [(torch.randn(2, 2),)])


def test_calibration_moves_no_statistics_and_no_mode(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    model.train()
    before = copy.deepcopy(model.state_dict())
    calibrate(model, candidates(model)[0], batches)
    assert model.training and model.bn1.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_resnet56_keeps_its_accuracy() -> None:
    """The published weights in int8, where the data is: 500 test images, 128 for calibration."""
    try:
        model, data = load_pretrained("resnet56"), load_data("cifar10")
    except (DataError, ModelFileError):
        pytest.skip("needs CIFAR-10 and the ResNet-56 weights under RIDGELINE_DATA")
    before = stored_bytes(model), evaluate(model, data, limit=500).accuracy
    quantise_static_(model, [(data.prepare(data.train.inputs[:128]),)])
    assert stored_bytes(model) <= 0.27 * before[0]
    assert evaluate(model, data, limit=500).accuracy >= before[1] - 0.008
