"""Philox against the published vectors and plain Python; normals against their formula; streams that share nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError
from ridgeline.crossbar import noise
from ridgeline.crossbar.noise import Kind
from ridgeline.crossbar.plan import Draw

DRAW = Draw(seed=7, chip=3, layer=5, call=2)
CPU = torch.device("cpu")


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on whole numbers of Python."""
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(right >> 32) ^ counter[1] ^ key[0], right % 2**32, (left >> 32) ^ counter[3] ^ key[1], left % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def counter_of(draw: Draw, kind: Kind, index: int) -> list[int]:
    return [index % 2**32, index >> 32, draw.layer * 16 + kind, 0 if kind in (Kind.PROGRAM, Kind.OFFSET) else draw.call]


def as_int64(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


# Counter, key, words: the known answers published with Random123.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_philox_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    c, k, e = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert philox(c, k) == e
    draw = Draw(seed=k[0], chip=k[1], layer=c[2] // 16, call=c[3])
    index = torch.tensor(as_int64(c[0] + (c[1] << 32)))
    assert noise.words(draw, c[2] % 16, index).tolist() == e  # type: ignore[arg-type]


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**28 - 1), st.integers(0, 2**32 - 1),
    st.sampled_from(Kind), st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_words_are_those_of_plain_python(seed: int, chip: int, layer: int, call: int, kind: Kind, index: int) -> None:
    draw = Draw(seed, chip, layer, call)
    assert noise.words(draw, kind, torch.tensor([index])).tolist() == [philox(counter_of(draw, kind, index), [seed, chip])]


@pytest.mark.parametrize("kind", [Kind.READ, Kind.OFFSET])
def test_normals_and_uniforms_follow_their_formulas(kind: Kind) -> None:
    index = torch.tensor([[0, 1, 2, 3], [4, 70_001, 2**32 + 6, 2**40 + 3]])
    wanted_normal, wanted_uniform = [], []
    for one in index.flatten().tolist():
        four = philox(counter_of(DRAW, kind, one // 4), [DRAW.seed, DRAW.chip])
        first, second = four[:2] if one % 4 < 2 else four[2:]
        radius = math.sqrt(-2 * math.log(((first >> 8) + 1) / 2**24))
        wanted_normal.append(radius * (math.sin, math.cos)[one % 2 == 0](2 * math.pi * (second >> 8) / 2**24))
        wanted_uniform.append((four[one % 4] >> 8) / 2**24)
    torch.testing.assert_close(noise.normal(DRAW, kind, index).flatten().tolist(), wanted_normal, rtol=0, atol=1e-12)
    assert noise.uniform(DRAW, kind, index).flatten().tolist() == wanted_uniform
    single = noise.normal(DRAW, kind, index, torch.float32)
    assert single.dtype == torch.float32 and (single - noise.normal(DRAW, kind, index)).abs().max() < 1e-6


@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 2), (5, 300), (2**33 + 1, 9), (4, 0)])
def test_a_range_of_normals_is_each_of_them(start: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "PIECE_CPU", 16)
    index = torch.arange(start, start + count)
    torch.testing.assert_close(noise.normals(DRAW, Kind.READ, start, count, CPU), noise.normal(DRAW, Kind.READ, index), rtol=0, atol=1e-12)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.arange(1000).reshape(10, 100)
    whole = [noise.words(DRAW, Kind.ADC, index), noise.normal(DRAW, Kind.ADC, index), noise.uniform(DRAW, Kind.ADC, index)]
    monkeypatch.setattr(noise, "PIECE_CPU", 37)
    cut = [noise.words(DRAW, Kind.ADC, index), noise.normal(DRAW, Kind.ADC, index), noise.uniform(DRAW, Kind.ADC, index)]
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_cell_has_a_counter_of_its_own() -> None:
    index = torch.tensor([0, 1, 9, 2**33])
    four = noise.cell_words(DRAW, index)
    assert torch.equal(torch.stack(four, -1), noise.words(DRAW, Kind.PROGRAM, index))
    write, drift = noise.cell_normals(four[0], four[1])
    same = noise.normal(DRAW, Kind.PROGRAM, torch.stack([4 * index, 4 * index + 1]))
    torch.testing.assert_close(torch.stack([write, drift]), same, rtol=0, atol=1e-12)


def test_moments() -> None:
    count = 400_000
    z = noise.normals(DRAW, Kind.READ, 0, count, CPU)
    error = count**-0.5
    assert abs(z.mean()) < 4 * error and abs(z.var() - 1) < 4 * 2**0.5 * error
    assert abs((z**3).mean()) < 4 * 15**0.5 * error and abs((z**4).mean() - 3) < 4 * 96**0.5 * error
    for lag in (1, 2, 3, 4):
        assert abs((z[lag:] * z[:-lag]).mean()) < 4 * error
    u = noise.uniform(DRAW, Kind.DAC, torch.arange(100_000))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 4 * 12**-0.5 * 100_000**-0.5


def test_every_part_of_the_name_gives_other_numbers() -> None:
    count = 40_000
    others = [replace(DRAW, seed=8), replace(DRAW, chip=4), replace(DRAW, layer=6), replace(DRAW, call=3)]
    streams = [noise.normals(draw, Kind.READ, 0, count, CPU) for draw in (DRAW, *others)]
    streams += [noise.normals(DRAW, kind, 0, count, CPU) for kind in Kind if kind != Kind.READ]
    between = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams), dtype=torch.float64)
    assert between.abs().max() < 5 * count**-0.5
    assert torch.equal(streams[0], noise.normals(DRAW, Kind.READ, 0, count, CPU))


def test_a_chip_is_programmed_once() -> None:
    index = torch.arange(8)
    for kind in Kind:
        same = torch.equal(noise.words(DRAW, kind, index), noise.words(replace(DRAW, call=9), kind, index))
        assert same == (kind in (Kind.PROGRAM, Kind.OFFSET))


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 2**32}, {"chip": 2**32}, {"layer": 2**28}, {"call": -1}])
def test_a_name_that_would_be_cut_is_an_error(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        noise.words(replace(DRAW, **wrong), Kind.READ, torch.arange(2))
