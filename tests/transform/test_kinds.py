"""The allow-list: every kind has a home, plain layers come back as they were, nothing else is built."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import ModelFileError
from ridgeline.transform import kinds
from tests.support import ROOT

LAYERS = [
    nn.Linear(3, 5), nn.Linear(3, 5, bias=False), nn.Conv1d(2, 4, 3, padding=1),
    nn.Conv2d(4, 6, (3, 1), stride=2, padding=(1, 0), groups=2),
    nn.Conv2d(2, 2, 3, padding="same", padding_mode="reflect"), nn.Conv3d(1, 2, 2), nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1),
    nn.Embedding(7, 3, padding_idx=1), nn.BatchNorm1d(3), nn.BatchNorm2d(3, eps=1e-3, momentum=None, affine=False),
    nn.BatchNorm2d(3, track_running_stats=False), nn.LayerNorm((2, 3)), nn.RMSNorm(4, eps=1e-6), nn.GroupNorm(2, 4), nn.Identity(),
    nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.2), nn.GELU("tanh"), nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.Tanh(),
    nn.Softmax(-1),
    nn.Dropout(0.3), nn.Flatten(1, 2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(2, count_include_pad=False),
    nn.AdaptiveAvgPool2d((1, 1)), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), nn.ModuleList([nn.Linear(1, 1)]),
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_plain_layer_comes_back(layer: nn.Module) -> None:
    description = kinds.describe(layer)
    twin = kinds.build(json.loads(json.dumps(description)))
    assert str(twin) == str(layer)
    assert kinds.describe(twin) == description
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in layer.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in twin.state_dict().items()} == shapes


def test_every_plain_kind_is_tried() -> None:
    assert {type(layer) for layer in LAYERS} == {plain[0] for plain in kinds.PLAIN.values()}


def registered_in_source() -> dict[str, str]:
    """Kind → module, read from the decorators themselves."""
    folder = ROOT / "src" / "ridgeline" / "transform"
    found = {}
    for path in folder.rglob("*.py"):
        for name in re.findall(r'^@layer_kind\("([^"]+)"\)', path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = "." + ".".join(path.relative_to(folder).with_suffix("").parts)
    return found


def test_every_kind_has_its_home() -> None:
    assert registered_in_source() == kinds.HOMES


@pytest.mark.parametrize("name", sorted(kinds.HOMES))
def test_a_home_registers_its_kind(name: str) -> None:
    importlib.import_module(kinds.HOMES[name], "ridgeline.transform")
    assert name in kinds._CLASSES
    cls = kinds._CLASSES[name]
    assert callable(cls.config) and callable(cls.from_config)


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"kind": "liner", "in_features": 1}, "did you mean linear"),
        ({"kind": "os.system"}, "only known kinds"),
        ({"kind": 3}, "only known kinds"),
        ({}, "only known kinds"),
        ([], "not an object"),
        ({"kind": "linear", "in_features": 2}, "cannot be built"),
        ({"kind": "linear", "in_features": -2, "out_features": 3}, "cannot be built"),
        ({"kind": "linear", "in_features": 2, "out_features": 3, "device": "nowhere"}, "cannot be built"),
        ({"kind": "relu", "parts": {"0": {"kind": "relu"}}}, "parts in a layer that has none"),
        ({"kind": "sequential", "parts": []}, "parts is a list"),
        ({"kind": "sequential", "parts": {"a.b": {"kind": "relu"}}}, "cannot be built"),
        ({"kind": "conv2d-packed", "shape": "?"}, "cannot be built"),
    ],
)
def test_nonsense_is_refused(description: Any, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        kinds.build(description)


def test_nesting_is_bounded() -> None:
    description: dict[str, Any] = {"kind": "relu"}
    for _ in range(40):
        description = {"kind": "sequential", "parts": {"0": description}}
    with pytest.raises(ModelFileError, match="deep"):
        kinds.build(description)


def test_huge_sizes_cost_nothing_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = kinds.build({"kind": "linear", "in_features": 10**7, "out_features": 10**7, "bias": False})
    assert layer.get_parameter("weight").is_meta


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        kinds.layer_kind("linear")(nn.Linear)
    with pytest.raises(ValueError, match="twice"):
        kinds.layer_kind("conv2d-int8")(nn.Linear)
