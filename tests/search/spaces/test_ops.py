"""Ops: shapes at every stride and size, the two ways of halving, and the registry."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.search.spaces.ops import FactorizedReduce, make_op, op_names, register_op, set_drop_path


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


def test_names_are_taken_once_and_plain() -> None:
    for name in ("none", "", "a/b", "<script>"):
        with pytest.raises(OptionError):
            register_op(name, lambda *arguments: torch.nn.Identity())
    with pytest.raises(UnknownNameError, match="sep_conv_3x3"):
        make_op("sep_conv3x3", 4, 4)
    with pytest.raises(OptionError):
        set_drop_path(torch.nn.Identity(), 1.0)
