"""Folding: exact against float64, and only where it is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise.fold import fold_norms_, norm_as_affine, norm_pairs, put, trace
from tests.support import full_or_tenth


def awake(norm: nn.BatchNorm2d, seed: int = 0) -> nn.BatchNorm2d:
    """A norm whose every number matters."""
    made = torch.Generator().manual_seed(seed)
    size = norm.num_features
    norm.running_mean = torch.randn(size, generator=made)
    norm.running_var = torch.rand(size, generator=made) * 4 + 1e-3
    if norm.affine:
        norm.weight.data, norm.bias.data = torch.randn(size, generator=made), torch.randn(size, generator=made)
    return norm.eval()


class Net(nn.Module):
    """A chain, a residual sum, a shared convolution, and a norm that is not alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), awake(nn.BatchNorm2d(4), 1)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), awake(nn.BatchNorm2d(4), 2)
        self.twice, self.bn3 = nn.Conv2d(4, 4, 1), awake(nn.BatchNorm2d(4), 3)
        self.read, self.bn4 = nn.Conv2d(4, 4, 1), awake(nn.BatchNorm2d(4), 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = x + self.bn2(self.conv2(x))
        x = self.bn3(self.twice(self.twice(x)))
        y = self.read(x)
        return self.bn4(y) + y


def test_only_right_pairs_are_folded() -> None:
    model = Net().eval()
    graph = trace(model)
    assert graph is not None
    assert norm_pairs(model, graph) == [("conv1", "bn1"), ("conv2", "bn2")]


def test_folded_model_is_the_same_function_in_float64() -> None:
    torch.manual_seed(0)
    model = Net().double().eval()
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x)
        assert fold_norms_(model) == [("conv1", "bn1"), ("conv2", "bn2")]
        assert isinstance(model.bn1, nn.Identity) and isinstance(model.bn3, nn.BatchNorm2d)
        torch.testing.assert_close(model(x), wanted, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 5), st.booleans(), st.booleans(), st.floats(1e-7, 1.0), st.integers(0, 10_000))
@settings(max_examples=full_or_tenth(200), deadline=None)
def test_float32_fold_is_within_rounding_of_float64(channels: int, bias: bool, affine: bool, eps: float, seed: int) -> None:
    torch.manual_seed(seed)
    conv, norm = nn.Conv2d(2, channels, 3, bias=bias), awake(nn.BatchNorm2d(channels, eps=eps, affine=affine), seed)
    model = nn.Sequential(conv, norm).eval()
    x = torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        exact = nn.Sequential(conv, norm).double()(x.double())
        plain = (model.float()(x) - exact).abs().max()
        fold_norms_(model)
        ours = (model(x) - exact).abs().max()
    assert ours <= 2 * plain + 4e-6 * exact.abs().max() + 1e-6


def test_a_planted_wrong_epsilon_is_seen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), awake(nn.BatchNorm2d(2, eps=1e-3))).double().eval()
    x = torch.randn(4, 1, 3, 3, dtype=torch.float64)
    wanted = model(x)
    model[1].eps = 1e-2
    fold_norms_(model)
    assert (model(x) - wanted).abs().max() > 1e-4


def test_norms_without_statistics_and_linear_layers_are_left() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(), nn.Linear(8, 2), nn.BatchNorm1d(2)
    )
    assert fold_norms_(model.eval()) == []


def test_affine_form_of_a_norm() -> None:
    norm = awake(nn.BatchNorm2d(3)).double()
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    factor, shift = norm_as_affine(norm)
    torch.testing.assert_close(x * factor.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1), norm(x))


def test_named_pairs_serve_where_tracing_cannot() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 2, 1), awake(nn.BatchNorm2d(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) if x.sum() > 0 else self.norm(self.conv(-x))

    model = Branch().eval()
    x = torch.rand(1, 1, 2, 2)
    wanted = model(x)
    assert trace(model) is None and fold_norms_(model) == []
    assert fold_norms_(model, [("conv", "norm")]) == [("conv", "norm")]
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("pair", [("0", "nowhere"), ("1", "0"), ("0", "2")])
def test_wrong_named_pairs_are_refused(pair: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()).eval()
    with pytest.raises(TransformError, match="fold"):
        fold_norms_(model, [pair])


def test_put_replaces_a_shared_layer_everywhere_and_refuses_the_model_itself() -> None:
    one = nn.Linear(2, 2)
    model = nn.Sequential(one, nn.Sequential(one))
    put(model, "0", nn.Identity())
    assert isinstance(model[0], nn.Identity) and model[1][0] is model[0]
    with pytest.raises(TransformError, match="one layer"):
        put(one, "", nn.Identity())
