"""Drawings: well-formed SVG with every op once, no script, labels apart from each other."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter

import numpy as np
import pytest

from ridgeline.core.errors import OptionError
from ridgeline.search.spaces import load_space
from ridgeline.search.spaces.draw import draw

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(f"{SVG}text"))


@pytest.mark.parametrize("name", ["darts", "nb201"])
@pytest.mark.parametrize("seed", range(3))
def test_cells_show_every_op_apart(name: str, seed: int) -> None:
    space = load_space(name)
    genotype = space.genotype(space.random(np.random.default_rng(seed)))
    picture = draw(genotype)
    ops = [op for nodes in genotype["cells"].values() for into in nodes for op, _ in into if op != "none"]
    labels = [text for text in texts(picture) if text.text in set(ops)]
    assert Counter(text.text for text in labels) == Counter(ops)
    places = [(float(text.attrib["x"]), float(text.attrib["y"])) for text in labels]
    for place, (x, y) in enumerate(places):
        assert all(abs(x - other_x) >= 100 or abs(y - other_y) >= 18 for other_x, other_y in places[:place])
    assert "<script" not in picture


@pytest.mark.parametrize("name", ["macro", "residual", "transformer"])
def test_layered_nets_have_a_bar_a_layer(name: str) -> None:
    space = load_space(name)
    genotype = space.genotype(space.random(np.random.default_rng(0)))
    picture = draw(genotype)
    bars = [box for box in ElementTree.fromstring(picture).iter(f"{SVG}rect") if box.get("class") == "bar"]
    assert len(bars) == len(genotype["stages" if name == "residual" else "layers"])
    if name == "macro":
        assert sum("stride 2" in (text.text or "") for text in texts(picture)) == sum(layer["stride"] == 2 for layer in genotype["layers"])


def test_a_broken_genotype_is_not_drawn() -> None:
    genotype = load_space("nb201").genotype((0,) * 6)
    genotype["cells"]["cell"][0][0][0] = "</text><script>"
    with pytest.raises(OptionError):
        draw(genotype)
