"""Packed layers: outputs against float64 of the dequantised weights, kernels where there are any, and the state dict as the only truth."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import TransformError
from ridgeline.transform.kinds import build, describe
from ridgeline.transform.quantise import layouts
from ridgeline.transform.quantise.codebook import quantise_as
from ridgeline.transform.quantise.grid import Grid, Quantised, dequantise, quantise
from ridgeline.transform.quantise.packed import PackedConv2d, PackedEmbedding, PackedLinear

GRIDS = [
    Grid(bits, symmetric, granularity, 64, form, scale_type)  # type: ignore[arg-type]
    for bits in (2, 3, 4, 6, 8)
    for symmetric, form in ((True, "zero"), (False, "zero"), (False, "minimum"))
    for granularity, scale_type in (("tensor", "float32"), ("channel", "bfloat16"), ("group", "float16"))
]


def weight_of(rows: int = 48, columns: int = 256, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def off(found: Tensor, exact: Tensor) -> float:
    """Root mean square error over that of the exact outputs: a wrong scale cannot hide behind the largest rounding error."""
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def linear(grid: Grid, bias: bool = True, rows: int = 48, columns: int = 256) -> PackedLinear:
    done = quantise(weight_of(rows, columns), grid)
    return PackedLinear.from_quantised(done, weight_of(1, rows)[0] if bias else None)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_linear_against_float64_of_its_weights(grid: Grid) -> None:
    layer = linear(grid)
    wide = layer.dequantised(torch.float64)
    assert torch.equal(wide, dequantise(quantise(weight_of(), grid), torch.float64))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert layer.bias is not None
        exact = functional.linear(x.double(), wide, layer.bias.double())
        plain = functional.linear(x, wide.to(dtype), layer.bias.to(dtype))
        with torch.no_grad():
            found = layer(x)
        assert found.dtype is dtype
        assert off(found, exact) <= 2 * off(plain, exact) + torch.finfo(dtype).eps / 4
        assert off(found * 1.01, exact) > 2 * off(plain, exact) + torch.finfo(dtype).eps / 4  # a planted 1 % error is seen


def kernel_of(layer: PackedLinear) -> str | None:
    return None if layer._layout is None else layer._layout.kernel


@pytest.mark.parametrize(
    ("grid", "kernel"),
    [
        (Grid(8), "int8-cpu"), (Grid(6, True, "tensor"), "int8-cpu"), (Grid(8, False), None), (Grid(8, True, "group"), None),
        (Grid(4, False, "group", 64), "int4-cpu"), (Grid(4, True, "channel"), "int4-cpu"), (Grid(2, False, "tensor"), "int4-cpu"),
        (Grid(3, False, "group", 32, "minimum", "float16"), "int4-cpu"), (Grid(4, True, "group", 48), None),
    ],
)  # fmt: skip
def test_which_kernel_runs(grid: Grid, kernel: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(grid, bias=False), torch.randn(2, 256).bfloat16()
    with torch.no_grad():
        layer(x)
    assert kernel_of(layer) == kernel
    assert layer.runs_packed()[0] is (kernel is not None)
    unable, why = layer.runs_packed(dtype=torch.float32)
    assert not unable and why
    # the kernel, not the dequantised weight, gives the answer
    monkeypatch.setattr(PackedLinear, "dequantised", lambda *_: pytest.fail("dequantised"))
    if kernel is not None:
        layer(x)
    else:
        with pytest.raises(pytest.fail.Exception):
            layer(x)


def test_many_rows_and_gradients_take_the_dequantised_weight() -> None:
    layer = linear(Grid(8))
    layer(torch.randn(layouts.CPU_ROWS + 1, 256).bfloat16())
    assert kernel_of(layer) is None
    x = torch.randn(2, 256, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert kernel_of(layer) is None and layer.bias is not None and layer.bias.grad is not None
    assert x.grad is not None and torch.allclose(x.grad[0].float(), layer.dequantised().sum(0), atol=2e-2)


def test_storage_only_says_why() -> None:
    book = PackedLinear.from_quantised(quantise_as(weight_of(), "nf4", Grid(4)))
    assert book.runs_packed() == (False, "no kernel looks values up in a codebook")
    assert "rows in 16s" in linear(Grid(4), rows=10).runs_packed()[1]
    assert "one scale a channel" in linear(Grid(8, False)).runs_packed("cuda")[1]
    assert linear(Grid(8)).runs_packed("cuda") == (True, "int8 kernel, one byte a weight")
    assert "multiples of 128" in linear(Grid(4, False, "group", 48)).runs_packed("cuda")[1]
    assert not linear(Grid(8)).runs_packed("mps")[0]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_saved_tensors_build_the_same_layer(grid: Grid) -> None:
    layer = linear(grid)
    with torch.no_grad():
        layer(torch.randn(1, 256).bfloat16())
    description = json.loads(json.dumps(describe(layer)))
    twin = build(description)
    state = layer.state_dict()
    assert {name: (t.dtype, t.shape) for name, t in twin.state_dict().items()} == {name: (t.dtype, t.shape) for name, t in state.items()}
    twin.load_state_dict(state)
    x = torch.randn(4, 256)
    assert torch.equal(twin(x), layer(x))


def test_bytes() -> None:
    layer = linear(Grid(4, False, "group", 64, "zero", "float16"))
    assert layer.packed.shape == (48, 128) and layer.packed.dtype is torch.uint8
    assert layer.packed_bytes() == 48 * 128 + 48 * 4 * 2 + 48 * 4
    assert layer.logical_parameters() == 48 * 256 + 48
    assert layer.kernel_bytes() == 0
    with torch.no_grad():
        layer(torch.randn(1, 256).bfloat16())
    assert layer.kernel_bytes() == 48 * 128 + 48 * 4 * 2 * 2
    three = linear(Grid(3), bias=False)
    assert three.packed.shape == (48, 96) and three.packed_bytes() == 48 * 96 + 48 * 4
    eight = linear(Grid(8), bias=False)
    with torch.no_grad():
        eight(torch.randn(1, 256).bfloat16())
    assert eight._layout is not None and eight._layout.codes.data_ptr() == eight.packed.data_ptr()
    assert eight.kernel_bytes() == 48 * 2


def test_casts_change_no_weight_and_drop_the_layout() -> None:
    layer = linear(Grid(4, False, "group", 64, "minimum"))
    before = layer.dequantised()
    with torch.no_grad():
        layer(torch.randn(1, 256).bfloat16())
    cast = copy.deepcopy(layer).half()
    assert cast.scale.dtype is torch.float32 and torch.equal(cast.dequantised(), before) and cast._layout is None
    assert cast.bias is not None and cast.bias.dtype is torch.float32
    with torch.no_grad():
        first = layer(torch.ones(1, 256).bfloat16())
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["scale"] *= 2
    state["zero"] *= 2
    layer.load_state_dict(state)
    with torch.no_grad():
        second = layer(torch.ones(1, 256).bfloat16())
    assert layer.bias is not None
    assert torch.allclose(second.float() - layer.bias, 2 * (first.float() - layer.bias), atol=0.05)


def test_shared_tables_stay_shared_when_moved() -> None:
    table = PackedEmbedding.from_quantised(quantise(weight_of(), Grid(8)))
    head = PackedLinear.from_quantised(table.quantised())
    head.packed, head.scale = table.packed, table.scale
    model = nn.ModuleDict({"table": table, "head": head})
    kept = [table.packed, table.scale]
    model.to("meta")
    assert table.packed.is_meta and table.packed is head.packed and table.scale is head.scale
    assert not kept[0].is_meta


def test_input_scale_multiplies_x() -> None:
    by = torch.rand(256) + 0.5
    layer = PackedLinear.from_quantised(quantise(weight_of(), Grid(8)), input_scale=by)
    x = torch.randn(3, 256)
    assert torch.allclose(layer(x), functional.linear(x * by, layer.dequantised()), atol=1e-6)
    twin = build(json.loads(json.dumps(describe(layer))))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1}, {"stride": 2, "padding": (1, 2), "dilation": 2}, {"groups": 2, "bias": False}, {"padding": "same"},
        {"padding": 1, "padding_mode": "reflect"}, {"padding": "same", "padding_mode": "circular", "dilation": (1, 2)},
        {"padding": "same", "padding_mode": "circular"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("grid", [Grid(4), Grid(3, False, "group", 16), Grid(8, True, "tensor")], ids=str)
def test_convolution(options: dict[str, object], grid: Grid) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, (3, 4), **options)  # type: ignore[arg-type]
    layer = PackedConv2d.from_quantised(quantise(plain.weight, grid), plain, plain.bias)
    assert not layer.runs_packed()[0]
    twin = build(json.loads(json.dumps(describe(layer))))
    twin.load_state_dict(layer.state_dict())
    plain.weight.data = layer.dequantised()
    x = torch.randn(2, 4, 9, 10)
    assert torch.equal(layer(x), plain(x)) and torch.equal(twin(x), plain(x))
    assert layer.logical_parameters() == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("form", ["uniform", "nf4", "codebook"])
def test_embedding_unpacks_the_rows_asked_for(form: str) -> None:
    grid = Grid(4, form != "uniform", "group" if form == "nf4" else "channel", 32)
    layer = PackedEmbedding.from_quantised(quantise_as(weight_of(20, 33), form, grid))
    tokens = torch.tensor([[3, 19, 3], [0, 7, 1]])
    assert torch.equal(layer(tokens), layer.dequantised()[tokens])
    assert layer.to(torch.bfloat16)(tokens).dtype is torch.bfloat16
    twin = build(json.loads(json.dumps(describe(layer))))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(tokens), layer(tokens))


def test_fill_refuses_another_shape() -> None:
    with pytest.raises(TransformError, match="shapes and grids must agree"):
        linear(Grid(8)).fill(quantise(weight_of(8, 8), Grid(8)))


@pytest.mark.parametrize("columns", [70, 72, 100, 112])
def test_rows_of_any_length_in_eight_bits(columns: int) -> None:
    layer = linear(Grid(8), columns=columns).bfloat16()
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = functional.linear(x.double(), layer.dequantised(torch.float64), layer.bias.double())  # type: ignore[union-attr]
    assert float((layer(x).double() - exact).detach().abs().max()) <= 0.02 * float(exact.abs().max())


@pytest.mark.parametrize("grid", [g for g in GRIDS if g.bits <= 4], ids=str)
def test_cuda_layout_holds_the_same_weights(grid: Grid) -> None:
    """Without a GPU: the layout is unpacked again by the kernel room's own dequantiser, and the product taken by its reference."""
    from ridgeline.kernel.weight_only import dequantize_int4

    done: Quantised = quantise(weight_of(), grid)
    kernel, _ = layouts.choose(grid, 48, 256, "cuda", torch.bfloat16)
    assert kernel == "int4-cuda"
    layout = layouts.build(kernel, done, torch.bfloat16)
    wide = dequantize_int4(layout.codes, layout.scale, layout.group, 256, layout.zero, torch.float64)
    if layout.rest is not None:
        wide = wide + layout.rest.double().repeat_interleave(layout.group, 1)[:, :256]
        assert float((layout.rest.abs() / layout.scale).median()) <= 0.5
    exact = dequantise(done, torch.float64)
    assert torch.allclose(wide, exact, atol=1e-6 * float(exact.abs().max()))
    x = torch.randn(3, 256)
    assert torch.allclose(layouts.multiply(layout, x, None), functional.linear(x, exact.float()), atol=1e-5)
