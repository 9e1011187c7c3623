"""Quantisation-aware training: gradients by hand, and a converted model that answers as the trained one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.train.fit import fit
from ridgeline.transform.quantise.grid import Grid, fake_quantise
from ridgeline.transform.quantise.int8_layers import Activation, Int8Layer
from ridgeline.transform.quantise.packed import PackedConv2d, PackedLinear
from ridgeline.transform.quantise.qat import FakeQuantised, best_scale, convert_, foldable, taught_by, wrap_
from ridgeline.transform.quantise.static import candidates
from ridgeline.transform.quantise.step import quantize
from ridgeline.workload.data import Data, Split


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


@pytest.fixture(scope="module")
def data() -> Data:
    """Three classes that one bright row, column or corner tells apart."""
    made = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 3, (512,), generator=made)
    images = torch.rand(512, 1, 8, 8, generator=made)
    images[targets == 0, :, 2] += 1
    images[targets == 1, :, :, 5] += 1
    images[targets == 2, :, :3, :3] += 1
    half = Split(images[:384], targets[:384]), Split(images[384:], targets[384:])
    return Data("marks", "image", 3, *half)


@pytest.fixture(scope="module")
def trained(data: Data) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    fit(model, data, epochs=6, batch=32, learning_rate=0.05, progress=False)
    return model.eval()


def accuracy(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return float((model.eval()(data.test.inputs).argmax(1) == data.test.targets).float().mean())


def wrapped(model: nn.Module, data: Data, **options: object) -> tuple[nn.Module, list[tuple[str, str]]]:
    model = copy.deepcopy(model)
    pairs = foldable(model, None, candidates(model)[0])
    wrap_(model, [(data.train.inputs[:128],)], **options)  # type: ignore[arg-type]
    return model, pairs


@pytest.mark.parametrize("scale", ["learned", "max"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_converted_model_answers_as_the_trained_one(trained: nn.Module, data: Data, scale: str, bits: int) -> None:
    model, pairs = wrapped(trained, data, bits=bits, scale=scale)
    assert pairs == [("conv1", "bn1"), ("conv2", "bn2")]
    fit(model, data, steps=6, batch=32, learning_rate=0.01, progress=False)
    with torch.no_grad():
        model.bn1.weight[2] *= -1  # a negative γ
        model.bn2.weight[1] = 0.0
        wanted = model.eval()(data.test.inputs)
        rows, _ = convert_(model, pairs)
        found = model(data.test.inputs)
    assert all(isinstance(getattr(model, name), Int8Layer) for name in ("conv1", "conv2", "fc"))
    assert isinstance(model.bn1, nn.Identity) and all(row.bits == bits for row in rows)
    # float rounding may move an activation to the next code: rare, and one step small
    off = (found - wanted).abs() / wanted.abs().max()
    assert off.max() < 0.02 and off.mean() < 1e-3


def test_one_layer_converts_exactly() -> None:
    torch.manual_seed(1)
    for layer, x in ((nn.Conv2d(4, 6, 3, padding=1), torch.randn(3, 4, 7, 7)), (nn.Linear(12, 5), torch.randn(9, 12))):
        fake = FakeQuantised(layer, 4, Activation(0.04, 120))
        holder = nn.Sequential(fake).eval()
        with torch.no_grad():
            wanted = holder(x).double()
            codes, exact = fake.quantised(), holder.double()(x.double())
            holder.float()
            convert_(holder, [])
        assert torch.equal(holder[0].integers().reshape(codes.codes.shape), codes.codes)
        torch.testing.assert_close(holder(x).double(), wanted, rtol=1e-5, atol=1e-5)
        assert (holder(x).double() - exact).abs().max() <= 2 * (wanted - exact).abs().max() + 1e-5


def test_gradients_are_lsq_by_hand() -> None:
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data = torch.tensor([[0.26, -0.9, 0.12]])
    fake = FakeQuantised(layer, 3, None)
    fake.weight_scale.data.fill_(0.1)  # type: ignore[union-attr]
    x = torch.tensor([[1.0, 10.0, 100.0]])
    fake(x).backward()
    # w/s = 2.6, -9 (beyond -4), 1.2: rounded 3, -4, 1
    assert torch.equal(layer.weight.grad, torch.tensor([[1.0, 0.0, 100.0]]))  # type: ignore[arg-type]
    by_hand = (1.0 * (3 - 2.6) + 10.0 * -4 + 100.0 * (1 - 1.2)) / (3 * 3) ** 0.5
    torch.testing.assert_close(fake.weight_scale.grad, torch.tensor([by_hand]), rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


def test_activation_scale_learns_too_and_max_scales_do_not() -> None:
    fake = FakeQuantised(nn.Linear(4, 2), 4, Activation(0.1, 10))
    fake(torch.randn(3, 4)).sum().backward()
    assert fake.input_scale.grad is not None and fake.weight_scale.grad is not None  # type: ignore[union-attr]
    plain = FakeQuantised(nn.Linear(4, 2), 4, Activation(0.1, 10), "max")
    assert {name for name, _ in plain.named_parameters()} == {"layer.weight", "layer.bias"}
    torch.testing.assert_close(plain.scale(), plain.weight.detach().abs().amax(1, keepdim=True) / 7)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_first_scales_beat_the_largest_weight(bits: int) -> None:
    weight = torch.randn(5, 400, generator=torch.Generator().manual_seed(2))
    grid = Grid(bits)

    def error(scale: Tensor) -> Tensor:
        return (fake_quantise(weight, scale, None, grid.low, grid.high) - weight).square().sum(1)

    whole = weight.abs().amax(1, keepdim=True) / grid.high
    assert (error(best_scale(weight, grid)) <= error(whole) * (1 + 1e-6)).all()
    if bits == 2:
        assert error(best_scale(weight, grid)).sum() < 0.7 * error(whole).sum()
    assert torch.isfinite(best_scale(torch.zeros(2, 3), grid)).all()


def test_training_wins_back_what_two_bits_cost(trained: nn.Module, data: Data) -> None:
    straight, pairs = wrapped(trained, data, bits=2)
    convert_(straight, pairs)
    model, pairs = wrapped(trained, data, bits=2)
    objective = taught_by(copy.deepcopy(trained), 3.0, 0.7)
    fit(model, data, epochs=4, batch=32, learning_rate=0.02, objective=objective, progress=False)
    convert_(model, pairs)
    assert accuracy(trained, data) > 0.97
    assert accuracy(model, data) >= accuracy(trained, data) - 0.03
    assert accuracy(model, data) >= accuracy(straight, data)


def test_without_activation_grids_weights_are_packed(trained: nn.Module, data: Data) -> None:
    model = copy.deepcopy(trained)
    pairs = foldable(model, None, candidates(model)[0])
    wrap_(model, None, bits=3, layer_bits={"fc": 8})
    wanted = model(data.test.inputs)
    rows, _ = convert_(model, pairs)
    assert isinstance(model.conv1, PackedConv2d) and isinstance(model.fc, PackedLinear)
    assert {row.name: row.bits for row in rows} == {"conv1": 3, "conv2": 3, "fc": 8} and rows[0].low is None
    torch.testing.assert_close(model(data.test.inputs), wanted, rtol=1e-4, atol=1e-4)


def test_a_diverged_training_is_refused(trained: nn.Module, data: Data) -> None:
    model, pairs = wrapped(trained, data)
    model.conv1.weight_scale.data[0] = torch.nan
    with pytest.raises(TransformError, match="conv1"):
        convert_(model, pairs)


def test_a_model_without_gradients_is_trained_all_the_same(data: Data) -> None:
    """As named models come: else the learned scales alone would train, and nobody would be told."""
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    made, _ = quantize(model, method="qat", data=data, epochs=1, batch=64, latency=False, require_gain=False)
    wanted, _ = quantize(model.requires_grad_(True), method="qat", data=data, epochs=1, batch=64, latency=False, require_gain=False)
    assert torch.equal(made.conv1.packed, wanted.conv1.packed) and torch.equal(made.conv1.scale, wanted.conv1.scale)
