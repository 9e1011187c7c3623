"""Emitted C, compiled and run, equals torch to the last bit on whole numbers, and is as accurate as torch on floats."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy
import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.lowering import (
    Nest,
    compile_layer,
    compile_layers,
    emit_c,
    lower,
    naive,
    recommended,
    reorder,
    shapes,
    tile,
    unroll,
    vectorise,
)
from ridgeline.estimate.spatial.lowering import emit as emit_module
from tests.estimate.spatial.lowering.cases import ARRAY, convolve, operands, random_layer, random_order, random_plan, random_transforms
from tests.support import FULL

LAYERS = 200 if FULL else 50


def random_nests(random: Random, layer: Layer, number: int) -> list[Nest]:
    """A mapping lowered; and by turns a mapping lowered and transformed, a plain nest transformed, the recommendation for some machine."""
    mapped = lower(layer, ARRAY, random_plan(random, layer))
    machine = random.choice(((4, 16), (8, 16), (16, 32)))
    others = [
        random_transforms(random, lower(layer, ARRAY, random_plan(random, layer))),
        random_transforms(random, random_order(random, layer)),
        recommended(layer, *machine, reassociate=random.random() < 0.5),
    ]
    return [mapped, *(others if FULL else [others[number % 3]])]


def wrong_layers(nests: list[Nest], dtype: str) -> list[str]:
    """Nests whose C does not give exactly what torch gives."""
    found = []
    for number, compiled in enumerate(compile_layers(nests, dtype)):
        weights, inputs = operands(compiled.layer, number, dtype)
        expected = convolve(compiled.layer, weights, inputs, torch.float64)
        if not numpy.array_equal(compiled(weights, inputs), expected):
            found.append(nests[number].text())
    return found


def test_fifty_random_layers_equal_torch_exactly() -> None:
    random = Random(7)
    nests = [nest for number in range(LAYERS) for nest in random_nests(random, random_layer(random, number), number)]
    assert wrong_layers(nests, "float32") == []


def test_integers_equal_torch_exactly() -> None:
    random = Random(8)
    nests = [random_transforms(random, random_order(random, random_layer(random, number))) for number in range(14)]
    assert wrong_layers(nests, "int32") == []


def test_int32_sums_wrap_around() -> None:
    compiled = compile_layer(naive(Layer("fc", {"C": 2})), "int32")
    weights, inputs = numpy.full((1, 2, 1, 1), 2, "int32"), numpy.full((1, 2, 1, 1), 2**30, "int32")
    assert compiled(weights, inputs).item() == 0


CONV = Layer("conv", {"K": 7, "C": 10, "P": 9, "Q": 13, "R": 3, "S": 3}, padding=(1, 1))


def broken_nests() -> dict[str, Nest]:
    """Tails forgotten: a guard dropped, a last tile not reached, a tile taken twice."""
    twice = tile(tile(naive(CONV), "c", 5), "ci", 3)
    short = tile(naive(CONV), "k", 3)
    return {
        "guard dropped": replace(twice, guards=()),
        "last tile missed": replace(short, loops=tuple(replace(one, extent=2) if one.index == "ko" else one for one in short.loops)),
        "wrong step": replace(short, loops=tuple(replace(one, step=2) if one.index == "ko" else one for one in short.loops)),
    }


@pytest.mark.parametrize("name", broken_nests())
def test_a_broken_nest_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="do not reach each of"):
        emit_c(broken_nests()[name])


@pytest.mark.parametrize("name", broken_nests())
def test_a_broken_nest_would_not_equal_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself sees a forgotten tail, should the check ever miss one."""
    monkeypatch.setattr(emit_module, "check_nest", lambda nest: None)
    # a dropped guard over C reads a little past both operands: give them room
    weights, inputs = (numpy.concatenate([a.ravel(), numpy.full(4096, 3, a.dtype)])[: a.size].reshape(a.shape) for a in operands(CONV, 1))
    result = compile_layer(broken_nests()[name])(weights, inputs)
    assert not numpy.array_equal(result, convolve(CONV, weights, inputs, torch.float64))


@pytest.mark.parametrize("plan", ["recommended", "lanes of C", "channels tiled"])
def test_floats_are_as_accurate_as_torch(plan: str) -> None:
    layer = Layer("conv", {"K": 24, "C": 96, "P": 9, "Q": 13, "R": 3, "S": 3}, padding=(1, 1))
    nests = {
        "recommended": recommended(layer, 8, 16),
        "lanes of C": vectorise(naive(layer, "k p q r s c"), "c", 8, reassociate=True),
        "channels tiled": reorder(tile(naive(layer), "c", 32), "co k p q ci r s"),
    }
    drawn = numpy.random.default_rng(3)
    weights, inputs = (drawn.standard_normal(shapes(layer)[operand]).astype("float32") for operand in ("W", "I"))
    exact = convolve(layer, weights, inputs, torch.float64)

    def error(result: numpy.ndarray) -> float:
        return float(numpy.sqrt(numpy.mean((result - exact) ** 2)))

    result = compile_layer(nests[plan])(weights, inputs)
    assert error(result) <= 2 * error(convolve(layer, weights, inputs, torch.float32))
    assert error(result * numpy.float32(1.01)) > 2 * error(convolve(layer, weights, inputs, torch.float32))


def test_padding_stride_and_phase_of_a_vectorised_row() -> None:
    """Neighbouring lanes read neighbouring elements of the copy although the layer's stride is 3."""
    layer = Layer("strided", {"C": 2, "P": 4, "Q": 6, "R": 2, "S": 5}, stride=(2, 3), dilation=(1, 2), padding=(1, 2), input_size=(7, 21))
    nest = vectorise(naive(layer, "p c r s q"), "q", 4)
    assert "*(const vec *)(padded" in emit_c(nest)
    assert wrong_layers([nest], "float32") == []


EDGES = """
import ctypes, mmap
import numpy
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.lowering import compile_layers, naive, reorder, shapes, tile, unroll, vectorise

def at_the_edge(shape):
    # the array ends where the readable memory ends
    size = 4 * int(numpy.prod(shape))
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, room + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return numpy.frombuffer(area, "float32", size // 4, room - size).reshape(shape)

layer = Layer("edges", {"B": 3, "G": 3, "K": 5, "C": 3, "P": 5, "Q": 5, "S": 3})
base = naive(layer, "b g k p q c r s")
block = unroll(unroll(unroll(base, "k", 4), "p", 2), "g", 2)
nests = [
    base,
    vectorise(reorder(tile(block, "q", 4), "b go ko po qo c r s gu ku pu qi"), "qi", 4),
    vectorise(reorder(block, "b go ko po c r s gu ku pu q"), "q", 8),
    *(vectorise(reorder(base, [n for n in base.order if n != last] + [last]), last, 4, reassociate=True) for last in "bgkpqcs"),
]
weights, inputs = (at_the_edge(shapes(layer)[operand]) for operand in "WI")
weights[...] = numpy.arange(weights.size).reshape(weights.shape) % 7
inputs[...] = numpy.arange(inputs.size).reshape(inputs.shape) % 5
plain, *rest = compile_layers(nests)
for compiled in rest:
    output = at_the_edge(shapes(layer)["O"])
    compiled.run_into(weights, inputs, output)
    assert numpy.array_equal(output, plain(weights, inputs))
print(len(rest), "inside")
"""


def test_tails_never_leave_the_operands() -> None:
    """Operands end at a page that may not be touched; in a process of its own, as a miss ends it."""
    done = subprocess.run([sys.executable, "-c", EDGES], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("9 inside", 0), done.stderr


def test_registers_hold_the_block() -> None:
    """Unrolled K and P around a vector of Q: one accumulator each, every operand loaded once, stored once."""
    nest = reorder(unroll(unroll(tile(naive(CONV), "q", 8), "k", 2), "p", 3), "ko po qo c r s ku pu qi")
    text = emit_c(vectorise(nest, "qi", 8))
    assert [text.count(f"acc{number} +=") for number in range(7)] == [1] * 6 + [0]
    assert [text.count(f"{name} =") for name in ("w0", "w1", "w2", "i2", "i3")] == [1, 1, 0, 1, 0]
    assert "memset" not in text
    assert "memset" in emit_c(reorder(naive(CONV), "c k p q r s"))


def test_a_name_cannot_leave_its_comment() -> None:
    text = emit_c(naive(Layer('x */ int evil; /* "\n#error', {"K": 2})))
    assert "*/ int" not in text and "\n#error" not in text
    assert text.count("/*") == text.count("*/")


def test_transfers_are_comments_where_they_happen() -> None:
    layer = Layer("fc", {"K": 6, "C": 4, "P": 3})
    nest = lower(layer, ARRAY, random_plan(Random(3), layer))
    assert nest.transfers
    for one in (nest, vectorise(nest, nest.order[-1], 2, reassociate=True)):
        text = emit_c(one)
        assert all(f"/* {transfer.text()} */" in text for transfer in one.transfers)


@pytest.mark.parametrize(
    ("options", "what"), [({"dtype": "float64"}, "dtype"), ({"name": "a b"}, "function name"), ({"name": "é"}, "function name")]
)
def test_unknown_types_and_names_are_errors(options: dict[str, str], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        emit_c(naive(CONV), **options)
