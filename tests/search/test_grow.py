"""Growth keeps the function: to 1e-10 in float64 and 1e-5 in float32, on plain nets and on those the spaces build."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError, RidgelineError, TransformError, UnknownNameError
from ridgeline.search.grow import Branched, branch, deeper, growable, wider
from ridgeline.search.spaces import Space, load_space
from ridgeline.search.spaces.transformer import FeedForward
from tests.support import FULL, full_or_tenth

SETTINGS = {
    "darts": {"channels": 4, "cells": 3, "image": 12 if FULL else 8},
    "nb201": {"channels": 4, "cells": 1, "image": 8},
    "macro": {"depths": (4, 6), "widths": ((8, 12), (12, 16)), "image": 8},
    "transformer": {"depths": (2,), "widths": (24,), "heads": (2,), "image": 8},
}
SPACES = {name: load_space(name, **chosen) for name, chosen in SETTINGS.items()}


class Plain(nn.Module):
    """Sums, products, concatenations, depthwise convolutions, a module used twice, and a linear layer over 2x2 places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), nn.BatchNorm2d(6), nn.Hardswish())
        self.twice = nn.Conv2d(6, 6, 1)
        self.left, self.right = nn.Conv2d(6, 2, 1), nn.Conv2d(6, 4, 1)
        self.gate = nn.Conv2d(6, 6, 1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.hidden = nn.Sequential(nn.Linear(24, 10), nn.BatchNorm1d(10), nn.ReLU())
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.depthwise(x)
        x = self.twice(torch.relu(self.twice(x)))
        both = torch.cat([self.left(x), self.right(x)], dim=1)  # channel by channel linked with x below
        x = (x + both) * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.out(self.hidden(torch.flatten(self.pool(x), 1)))


def trained(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """With batch norms whose weights and statistics are not the first ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.double().train()
    for _ in range(2):
        model(torch.randn(8, *shape, dtype=torch.float64))
    return model.eval()


@cache
def plain_once() -> nn.Module:
    torch.manual_seed(0)
    return trained(Plain(), (3, 8, 8))


def plain() -> nn.Module:
    return copy.deepcopy(plain_once())


@cache
def of_space_once(name: str, seed: int) -> nn.Module:
    space = SPACES[name]
    return trained(space.build(space.random(np.random.default_rng(seed)), seed=seed), space.input_shape)


def of_space(name: str, seed: int) -> tuple[Space, nn.Module]:
    return SPACES[name], copy.deepcopy(of_space_once(name, seed))


def apart(first: nn.Module, second: nn.Module, shape: tuple[int, ...]) -> float:
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        exact = first.double()(x)
        return float((second.double()(x) - exact).abs().max() / exact.abs().max())


def apart_in_float32(first: nn.Module, second: nn.Module, shape: tuple[int, ...]) -> float:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        exact = copy.deepcopy(first).float()(x)
        return float((copy.deepcopy(second).float()(x) - exact).abs().max() / exact.abs().max())


def test_every_layer_of_a_plain_net_widens() -> None:
    model = plain()
    assert growable(model) == {"first.0": 6, "twice": 6, "left": 2, "right": 4, "gate": 6, "hidden.0": 10}
    for path, channels in growable(model).items():
        for width in (channels + 1, 2 * channels, 3 * channels + 1):
            grown = wider(model, path, width)
            assert grown.get_submodule(path).weight.shape[0] == width
            assert apart(model, grown, (3, 8, 8)) < 1e-10
            assert apart_in_float32(model, grown, (3, 8, 8)) < 1e-5


def test_what_is_joined_grows_together() -> None:
    grown = wider(plain(), "left", 4)  # its two channels are the first two of six
    sizes = {path: tuple(grown.get_submodule(path).weight.shape[:2]) for path in ("left", "right", "twice", "gate", "first.0", "hidden.0")}
    assert sizes == {"left": (4, 8), "right": (4, 8), "twice": (8, 8), "gate": (8, 8), "first.0": (8, 3), "hidden.0": (10, 32)}
    assert grown.first[1].num_features == grown.depthwise[0].groups == 8
    assert grown.hidden[0].in_features == 32


@pytest.mark.parametrize("name", list(SPACES))
@pytest.mark.parametrize("seed", range(full_or_tenth(10)))
def test_nets_of_spaces_widen(name: str, seed: int) -> None:
    space, model = of_space(name, seed)
    layers = growable(model)
    assert layers
    chosen = list(layers)[:: max(1, len(layers) // (12 if FULL else 4))]
    for path in chosen:
        grown = wider(model, path, layers[path] + 3, seed=seed)
        assert apart(model, grown, space.input_shape) < 1e-10
        assert apart_in_float32(model, grown, space.input_shape) < 1e-5


def test_layers_that_share_a_batch_norm_grow_together() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.second(torch.relu(self.norm(self.first(x))))))

    model = trained(Twice(), (3, 6, 6))
    grown = wider(model, "second", 7)
    assert grown.first.weight.shape[0] == grown.norm.num_features == 7
    assert apart(model, grown, (3, 6, 6)) < 1e-10


def test_twins_learn_differently_with_noise_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(16, 3, dtype=torch.float64)
    for noise, same in ((0.0, True), (0.25, False)):
        grown = wider(model, "0", 8, noise=noise)
        grown(x).square().sum().backward()
        gradient = grown[0].weight.grad.reshape(4, 2, 3)  # twins stand beside each other
        assert torch.allclose(gradient[:, 0], gradient[:, 1]) == same
        assert torch.allclose(grown(x), model(x), atol=1e-12)


def test_training_goes_on_from_the_same_function() -> None:
    """In training mode too: twins have the statistics of their channel."""
    model = plain().train()
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    assert torch.allclose(wider(model, "first.0", 9)(x), model(x), atol=1e-10)
    assert model.training


def test_after_a_relu_a_layer_more_is_the_identity() -> None:
    model, x = plain(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    for inputs in (None, x):
        grown = deeper(model, "first.2", inputs, kernel=5)
        assert [type(module) for module in grown.first[2][1]] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
        assert apart(model, grown, (3, 8, 8)) < 1e-10
        assert apart_in_float32(model, grown, (3, 8, 8)) < 1e-5
    grown.first[2][1].train()  # with inputs, the batch's own statistics change nothing
    assert torch.allclose(grown(x), model(x), atol=1e-9)
    assert apart(model, deeper(model, "hidden.2"), (3, 8, 8)) < 1e-10


@pytest.mark.parametrize("name, path", [("darts", "cells.1"), ("nb201", "cells.2"), ("macro", "layers.1"), ("macro", "layers.0.body"),
                                        ("transformer", "1"), ("transformer", "2")])  # fmt: skip
def test_nets_of_spaces_get_deeper_and_branch(name: str, path: str) -> None:
    space, model = of_space(name, 0)
    x = torch.randn(2, *space.input_shape, dtype=torch.float64)
    for grown in (deeper(model, path, x), branch(model, path)):
        assert sum(p.numel() for p in grown.parameters()) > sum(p.numel() for p in model.parameters())
        assert apart(model, grown, space.input_shape) < 1e-10
        assert not grown.training
    grown(x).square().sum().backward()
    assert float(grown.get_submodule(path).gain.grad.abs()) > 0


def test_growth_upon_growth() -> None:
    model = plain()
    grown = branch(deeper(wider(model, "first.0", 9), "first.2"), "depthwise", lambda: nn.Conv2d(9, 9, 3, padding=1))
    assert isinstance(grown.depthwise, Branched)
    again = wider(grown, "first.2.1.0", 12)  # the new layer, and with it all it is added to
    assert apart(model, again, (3, 8, 8)) < 1e-10
    assert again.depthwise.side.weight.shape[:2] == (12, 12)


@pytest.mark.parametrize(
    "path, width, error",
    [("out", 9, TransformError), ("firts.0", 9, UnknownNameError), ("depthwise.0", 9, UnknownNameError), ("first.0", 6, OptionError)],
)
def test_what_cannot_widen_says_why(path: str, width: int, error: type[RidgelineError]) -> None:
    with pytest.raises(error):
        wider(plain(), path, width)


def test_structures_that_are_not_understood_are_refused() -> None:
    normed = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1))
    with pytest.raises(TransformError, match="GroupNorm"):
        wider(normed, "0", 8)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(TransformError, match="shared"):
        wider(tied, "0", 8)
    with pytest.raises(TransformError, match="list of modules"):
        deeper(of_space("darts", 0)[1], "cells")

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(TransformError, match="cannot be followed"):
        growable(Branching())


def test_a_layer_more_of_a_transformer_is_of_its_kind() -> None:
    grown = deeper(of_space("transformer", 0)[1], "2")
    assert [type(module) for module in grown[2]] == [FeedForward, FeedForward]
