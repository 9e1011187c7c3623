"""Ops: shapes at every stride and size, the two ways of halving, and the registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.search.latency import build_table
from ridgeline.search.spaces.ops import FactorizedReduce, make_op, op_names, register_op, set_drop_path
from ridgeline.search.spaces.space import load_space
from ridgeline.search.supernet.network import make_supernet


@pytest.mark.parametrize("name", [name for name in op_names() if not name.startswith("tests_")])
def test_every_op_gives_the_shape_it_should(name: str) -> None:
    for stride in (1, 2):
        for channels_out in (4, 6):
            for size in (5, 8):
                out = make_op(name, 4, channels_out, stride).eval()(torch.ones(2, 4, size, size))
                assert out.shape == (2, channels_out, -(-size // stride), -(-size // stride))
    affine = [module.affine for module in make_op(name, 4, 4, 2, affine=False).modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert not any(affine)


def test_factorized_reduce_looks_at_even_and_odd_places() -> None:
    module = FactorizedReduce(1, 2).eval()
    with torch.no_grad():
        module.even.weight.fill_(1.0)
        module.odd.weight.fill_(1.0)
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    out = module(x) * (1 + module.norm.eps) ** 0.5
    assert torch.allclose(out[0, 0], x[0, 0, ::2, ::2])
    assert torch.allclose(out[0, 1], x[0, 0, 1::2, 1::2])


@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        ("tests_small", lambda a, b, stride, affine: torch.nn.Conv2d(a, b, 3, stride), r"it gives \[2, 4, 6, 6\], not \[2, 4, 8, 8\]"),
        ("tests_fails", lambda a, b, stride, affine: torch.nn.Conv2d(a + 1, b, 1), "it fails: RuntimeError"),
        ("tests_arguments", lambda a, b: torch.nn.Identity(), "it fails: TypeError"),
        ("tests_no_tensor", lambda a, b, stride, affine: torch.nn.LSTM(8, 8), "it fails|it gives tuple"),
    ],
)
def test_an_op_that_does_not_fit_is_named(name: str, make: Any, told: str) -> None:
    register_op(name, make)
    space = load_space("nb201", channels=4, cells=1, image=8, ops=("none", name))
    with pytest.raises(OptionError, match=f"(?s)op '{name}' of 4 to 4 channels, stride 1.*{told}"):
        space.build((1,) * 6, seed=0)
    with pytest.raises(OptionError, match=name):
        make_supernet(load_space("nb201", channels=4, cells=1, image=8, ops=("none", "skip", name)))
    with pytest.raises(OptionError, match=name):
        build_table(space, "eyeriss")


def test_an_op_is_run_once_and_its_weights_are_as_if_it_were_not() -> None:
    runs: list[int] = []

    class Counted(torch.nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(len(x))
            return super().forward(functional.dropout(x, 0.5, True))

    register_op("tests_counted", lambda a, b, stride, affine: Counted(a, b, 1, stride))
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append([make_op("tests_counted", 4, 4).weight, make_op("tests_counted", 4, 4).weight])
    assert len(runs) == 1 and all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("ops", [5, None, "none", ["none", "skip"], ("none", 3), ("none", ("skip",)), {"a": 1}])
@pytest.mark.parametrize("space", ["nb201", "darts"])
def test_ops_are_a_list_of_names(space: str, ops: Any) -> None:
    kind = type(load_space(space))
    with pytest.raises(OptionError, match="ops = "):
        kind(ops=ops)  # type: ignore[call-arg]


def test_names_are_taken_once_and_plain() -> None:
    for name in ("none", "", "a/b", "<script>"):
        with pytest.raises(OptionError):
            register_op(name, lambda *arguments: torch.nn.Identity())
    with pytest.raises(UnknownNameError, match="sep_conv_3x3"):
        make_op("sep_conv3x3", 4, 4)
    with pytest.raises(OptionError):
        set_drop_path(torch.nn.Identity(), 1.0)
