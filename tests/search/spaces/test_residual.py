"""Residual networks stage by stage: ResNet-18 is a point, `channels` makes a found network wider, every kind of block learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.search.spaces import load_space
from ridgeline.search.spaces.residual import KINDS
from ridgeline.workload.models.wide_resnet import hand_made

AS_RESNET18 = {
    "widths": ((1,), (2,), (4,), (8,)),
    "blocks_each": (2,),
    "kinds": ("basic",),
    "attentions": ("none",),
    "activations": ("relu",),
}


def test_resnet18_is_a_point() -> None:
    ours = load_space("residual", channels=8, **AS_RESNET18).build((0,) * 17, seed=0).eval()
    theirs = hand_made("resnet18-w8").eval()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    sources = [module for module in theirs.modules() if next(module.children(), None) is None and list(module.parameters())]
    targets = [module for module in ours.modules() if next(module.children(), None) is None and list(module.parameters())]
    assert len(sources) == len(targets)
    for source, target in zip(sources, targets, strict=True):  # in both the shortcut is last in its block
        target.load_state_dict(source.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images))


def test_channels_make_a_found_network_wider() -> None:
    narrow = load_space("residual", channels=16)
    point = narrow.random(np.random.default_rng(3))
    genotype = narrow.genotype(point)
    wide = load_space("residual", **{**genotype["settings"], "channels": 32})
    assert wide.from_genotype({**genotype, "settings": wide.genotype(point)["settings"]}) == point
    before, after = (sum(p.numel() for p in space.build(point, seed=0).parameters()) for space in (narrow, wide))
    assert 3.5 < after / before < 4.2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains(kind: str) -> None:
    space = load_space("residual", channels=4, widths=((1,), (2,)), kinds=(kind,), attentions=("none",), image=8)
    net = space.build(space.random(np.random.default_rng(0)), seed=0)
    torch.nn.functional.cross_entropy(net(torch.randn(8, 3, 8, 8)), torch.arange(8)).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in net.parameters())
    assert all(bool(parameter.grad.any()) for parameter in net.parameters())  # type: ignore[union-attr]


def test_widths_that_fall_together_are_refused() -> None:
    with pytest.raises(OptionError, match="more channels"):
        load_space("residual", channels=1, widths=((1, 1.2),))
