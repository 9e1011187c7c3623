"""Numbers as people read them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.report import format as fmt

PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Z": 1e21,
    "m": 1e-3,
    "µ": 1e-6,
    "n": 1e-9,
    "p": 1e-12,
    "f": 1e-15,
}


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (fmt.seconds, 118.0e-6, "118 µs"),
        (fmt.seconds, 1.93e-6, "1.93 µs"),
        (fmt.seconds, 3.13e-3, "3.13 ms"),
        (fmt.seconds, 999.96e-6, "1 ms"),
        (fmt.seconds, 5.2e-10, "0.52 ns"),
        (fmt.seconds, 1250.0, "1,250 s"),
        (fmt.seconds, 0.0, "0 s"),
        (fmt.size, 1_925_504, "1.93 MB"),
        (fmt.size, 15.01e9, "15 GB"),
        (fmt.size, 512, "512 B"),
        (fmt.flop, 236_027_904, "236 MFLOP"),
        (fmt.flop_rate, 989e12, "989 TFLOP/s"),
        (fmt.byte_rate, 4.8e12, "4.8 TB/s"),
        (fmt.energy, 21.4e-3, "21.4 mJ"),
        (fmt.count, 25_557_032, "25.6 M"),
        (fmt.percent, 0.623, "62 %"),
        (fmt.percent, 0.034, "3.4 %"),
        (fmt.percent, 0.0004, "<0.1 %"),
        (fmt.percent, 0.0996, "10 %"),
        (fmt.signed_percent, 0.058, "+5.8 %"),
        (fmt.signed_percent, -0.12, "-12 %"),
        (fmt.speedup, 1.8, "1.8x"),
        (fmt.speedup, math.inf, "∞"),
        (fmt.fixed, 0.0000803, "<0.001"),
        (fmt.fixed, 0.2311, "0.231"),
        (fmt.fixed, 122.58, "123"),
    ],
)
def test_known_values(function, value, text):
    assert function(value) == text


@pytest.mark.parametrize("function", [fmt.seconds, fmt.size, fmt.flop, fmt.percent, fmt.speedup, fmt.significant, fmt.energy, fmt.fixed])
@pytest.mark.parametrize(("value", "sign"), [(None, "–"), (math.nan, "n/a"), (math.inf, "∞"), (-math.inf, "-∞")])
def test_what_is_no_number_still_reads(function, value, sign):
    assert function(value).startswith(sign)


@given(st.floats(min_value=1e-14, max_value=9e22))
def test_scaled_keeps_three_digits_and_a_fitting_prefix(value):
    text = fmt.scaled(value, "B")
    mantissa, prefix = re.fullmatch(r"([\d.,]+) ([a-zA-Zµ]?)B", text).groups()
    assert float(mantissa.replace(",", "")) * PREFIXES[prefix] == pytest.approx(value, rel=5.1e-3)
    assert 1 <= float(mantissa.replace(",", "")) < 1000


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_no_float_raises(value):
    for function in (fmt.seconds, fmt.size, fmt.flop, fmt.percent, fmt.signed_percent, fmt.speedup, fmt.significant, fmt.count, fmt.fixed):
        assert function(value)
    assert fmt.rate(value, "samples/s")


@given(st.text(max_size=40), st.integers(min_value=0, max_value=30))
def test_crop_never_exceeds_and_plain_never_steers(text, width):
    assert len(fmt.crop(text, width)) <= max(width, 0) or len(text) <= width
    assert len(fmt.crop(text, width, keep="end")) <= max(width, 0) or len(text) <= width
    assert fmt.plain(text).isprintable()
    assert len(fmt.plain(text)) == len(text)


def test_shapes_counts_and_rates():
    assert fmt.shape(((1, 64, 112, 112),)) == "1x64x112x112"
    assert fmt.shape(((2,), (3,))) == "2 +1"
    assert fmt.shape(((),)) == "scalar"
    assert fmt.shape(()) == "–"
    assert [fmt.many(1, "view"), fmt.many(1214, "op")] == ["1 view", "1,214 ops"]
    assert fmt.rate(2310.4, "samples/s") == "2,310 samples/s"
    assert fmt.crop("model.layers.31.mlp.down_proj", 14, keep="end") == "…mlp.down_proj"


def test_a_number_that_rounds_past_the_largest_float_is_shown():
    assert fmt.scaled(1.7950000000000001e308, "B") and fmt.size(-1.7976931348623157e308)
