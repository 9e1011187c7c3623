"""Taps, adapters and attention maps: what is caught, what it costs, what is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.features import Bridge, Taps, adapter, attention_loss, attention_map, hidden_loss


class Net(nn.Module):
    """A convolution whose output is changed in place, and one whose output is not."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.relu = nn.Conv2d(3, width, 3), nn.ReLU(inplace=True)
        self.second, self.unused = nn.Conv2d(width, width, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x))).mean((2, 3))


def test_taps_catch_outputs_and_leave_nothing_behind() -> None:
    net, x = Net(), torch.randn(2, 3, 8, 8)
    taps = Taps(net, ("second",), "the net")
    with taps:
        net(x)
        caught = taps.take()
        assert torch.equal(caught["second"], net.second(net.relu(net.first(x))))
    assert not net.second._forward_hooks and not taps.outputs
    with pytest.raises(RuntimeError, match="planted"), taps:
        raise RuntimeError("planted")
    assert not net.second._forward_hooks


def test_an_output_changed_in_place_is_copied_before_that() -> None:
    net, x = Net(), torch.randn(2, 3, 8, 8)
    taps = Taps(net, ("first", "second"), "the net")
    net.train()
    taps.try_out(net, x)
    assert taps.copied == {"first"} and net.training
    with taps:
        net(x)
        assert torch.equal(taps.take()["first"], net.first(x)), "the values before the ReLU"


def test_layers_that_are_not_there_or_not_run_are_named() -> None:
    net = Net()
    with pytest.raises(TransformError, match=r"no layer 'secnd'(.|\n)*second"):
        Taps(net, ("secnd",), "the student")
    with pytest.raises(TransformError, match="'unused' was not run"):
        Taps(net, ("unused",), "the student").try_out(net, torch.randn(1, 3, 8, 8))
    assert not net.unused._forward_hooks


@pytest.mark.parametrize(("shape", "wanted"), [((2, 3, 4, 4), (2, 5, 4, 4)), ((2, 6, 3), (2, 6, 5)), ((2, 3), (2, 5))])
def test_adapters_map_the_students_width_to_the_teachers(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    s, t = torch.randn(shape), torch.randn(wanted)
    fit = adapter(s, t)
    assert fit(s).shape == wanted and sum(p.numel() for p in fit.parameters()) == 3 * 5 + 5
    assert isinstance(adapter(s, s), nn.Identity)


def test_a_bridge_learns_and_its_loss_is_the_mean_squared_difference() -> None:
    torch.manual_seed(0)
    s, t = torch.randn(4, 3, 8, 8), torch.randn(4, 5, 4, 4)
    bridge = Bridge({"a": "b"}, "hidden", {"a": s}, {"b": t})
    loss = bridge({"a": s}, {"b": t})
    mapped = nn.functional.avg_pool2d(nn.functional.conv2d(s, bridge.adapters[0].weight, bridge.adapters[0].bias), 2)
    assert torch.allclose(loss, (mapped - t).square().mean())
    optimiser = torch.optim.SGD(bridge.parameters(), lr=0.5)
    for _ in range(200):
        optimiser.zero_grad()
        bridge({"a": s}, {"b": t}).backward()
        optimiser.step()
    assert bridge({"a": s}, {"b": t}) < 0.9 * loss


def test_attention_map_is_the_normalised_mean_of_squares() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    found = attention_map(x)
    for sample in range(2):
        squares = [sum(x[sample, c, i, j] ** 2 for c in range(3)) / 3 for i in range(4) for j in range(5)]
        length = sum(value**2 for value in squares) ** 0.5
        assert torch.allclose(found[sample], torch.stack([value / length for value in squares]))


def test_attention_loss_sees_shape_not_scale_and_resizes() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert attention_loss(x, 7.0 * x).item() == pytest.approx(0.0, abs=1e-12)
    assert attention_loss(x, x.flip(3)).item() > 1e-3
    smooth = torch.linspace(0.1, 1.0, 8, dtype=torch.float64).expand(2, 3, 8, 8)
    half = nn.functional.interpolate(smooth, size=(4, 4), mode="bilinear", align_corners=False)
    assert attention_loss(smooth, half).item() < 1e-2 < attention_loss(smooth, half.flip(3)).item()
    tokens = torch.randn(2, 6, 16)
    assert attention_map(tokens).shape == (2, 6)
    assert attention_loss(tokens, torch.randn(2, 6, 32)).item() > 0.0
    assert hidden_loss(tokens, tokens).item() == 0.0


def test_features_that_cannot_be_compared_are_refused() -> None:
    image, tokens, flat = torch.randn(2, 3, 4, 4), torch.randn(2, 6, 3), torch.randn(2, 3)
    for kind, s, t in (("hidden", image, tokens), ("attention", flat, flat), ("hidden", tokens, tokens[:, :4])):
        with pytest.raises(TransformError, match="features a"):
            Bridge({"a": "b"}, kind, {"a": s}, {"b": t})  # type: ignore[arg-type]
