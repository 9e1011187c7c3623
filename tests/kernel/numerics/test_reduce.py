"""Reductions against float64: values, gradients, dtypes, layouts, one launch and two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ridgeline.kernel import reduce, reduce_kernels, reduce_launch, reduce_plan, replace
from ridgeline.kernel.jit import jit, tl
from ridgeline.kernel.replace import REPLACEMENTS
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts

DIMS: tuple[Any, ...] = (None, 0, 1, -1, (0, 1), (0, 2))
KINDS = ("inner", "outer", "full", "split")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: too large to interpret")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)


@contextmanager
def small_tiles(launches: int = 1, per_sm: int = 1) -> Iterator[None]:
    """Cuts even small tensors into several tiles and pieces."""
    chosen = {"TILE": 64, "COLS": 16, "WARPS": 1, "PER_SM": per_sm, "LAUNCHES": launches}
    with ExitStack() as stack:
        for kind in KINDS:
            stack.enter_context(forced(f"reduce_{kind}", chosen))
        yield


def compare(ours: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    exact = plain(x.double(), *args, **{**kwargs, "dtype": torch.float64} if "dtype" in kwargs else kwargs)
    out = ours(x, *args, **kwargs)
    yardstick = two_pass if plain is torch.var and x.dtype == torch.float32 and not x.is_cuda else plain
    check(out, yardstick(x, *args, **kwargs), exact)


def two_pass(x: torch.Tensor, dim: Any = None, correction: int = 1) -> torch.Tensor:
    """Variance in float32: on a CPU torch.var adds up in float64, which no float32 result can be held to; on a GPU it does not."""
    dim = tuple(range(x.ndim)) if dim is None else dim
    squares = (x - x.mean(dim, keepdim=True)).square()
    return squares.sum(dim) / (x.numel() // max(1, x.mean(dim).numel()) - correction)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_floats_in_every_layout(dim: Any, dtype: torch.dtype, device: str) -> None:
    for name, x in layouts((3, 5, 16), dtype, device):
        # so that few sums are about zero, where a relative error means little; in place, to keep the strides
        x = (x[:, :1] + 1).expand(x.shape) if name == "broadcast" else x.add_(1)
        compare(reduce.sum, torch.sum, x, dim)
        if dtype == torch.float32:  # a sum with another last step, which the other tests divide in half types
            compare(reduce.mean, torch.mean, x, dim)
        compare(reduce.var, torch.var, x, dim)
        every = () if dim is None else dim
        assert torch.equal(reduce.amax(x, every), torch.amax(x, every)), name
        if not isinstance(dim, tuple):
            assert torch.equal(reduce.argmax(x, dim), reference_argmax(x, dim)), name


def reference_argmax(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The first maximum, NaN being one, by definition: torch does not promise the first on every device."""
    y = x.flatten() if dim is None else x.movedim(dim, -1)
    y = y.double()
    top = y.amax(-1, keepdim=True)
    same = (y == top) | (y.isnan() & top.isnan())
    place = torch.arange(y.shape[-1], device=x.device).expand(y.shape)
    return torch.where(same, place, y.shape[-1]).amin(-1)


@pytest.mark.parametrize("launches", [1, 2], ids=["one launch", "two launches"])
@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 150), None), ((24, 2, 20), 0), ((2, 3, 150), -1), ((5, 3, 70), (0, 2))], ids=str)
def test_pieces_are_combined(shape: tuple[int, ...], dim: Any, launches: int, device: str) -> None:
    x = torch.randn(shape, device=device) + 1
    with small_tiles(launches):
        call = reduce_launch.find("sum", x, dim, False)
        assert call is not None and call.splits > 1
        compare(reduce.sum, torch.sum, x, dim)
        compare(reduce.var, torch.var, x, dim)
        compare(reduce.mean, torch.mean, x.bfloat16(), dim, dtype=torch.float32)
        every = () if dim is None else dim
        assert torch.equal(reduce.amax(x, every), torch.amax(x, every))
        if not isinstance(dim, tuple):
            assert torch.equal(reduce.argmax(x, dim), reference_argmax(x, dim))
        first = reduce.sum(x, dim)
        assert torch.equal(first, reduce.sum(x, dim)), "the same bits again"
    assert all(not bool(count.any()) for count in reduce_launch._counters.values())


def test_one_axis_of_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for counts that a grid's second and third axis cannot hold; loops over several tiles."""
    monkeypatch.setattr(reduce_plan, "GRID_MOST", 1)
    monkeypatch.setattr(reduce_launch, "_calls", {})
    monkeypatch.setattr(reduce_plan, "SMS", 3)
    x = torch.randn(2, 70, 20, device=device) + 1
    with small_tiles(per_sm=4):
        for y, dim in ((x, 1), (x, (0, 2)), (x[:, :69, 1:], 1)):
            compare(reduce.sum, torch.sum, y, dim)
            compare(reduce.var, torch.var, y, dim)
        assert torch.equal(reduce.argmax(x, 1), reference_argmax(x, 1))
        call = reduce_launch.find("sum", x, 1, False)
        assert call is not None and call.stages[0].constants["LINEAR"] and not call.stages[0].constants["ONCE"] and call.splits > 1


def test_pieces_too_many_for_a_program(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial results are reduced as a tensor of their own, and divided only then."""
    monkeypatch.setattr(reduce_launch, "MOST_PIECES", 4)
    monkeypatch.setattr(reduce_launch, "_calls", {})
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(7, 3, 40, device=device) + 1).to(dtype)
        compare(reduce.sum, torch.sum, x, (0, 2))
        compare(reduce.mean, torch.mean, x, (0, 2))
        assert torch.equal(reduce.amax(x, (0, 2)), torch.amax(x, (0, 2)))
    call = reduce_launch.find("sum", x, (0, 2), False)
    assert call is not None and call.two and call.splits > 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_integers(dtype: torch.dtype, device: str) -> None:
    x = torch.randint(0 if dtype in (torch.uint8, torch.bool) else -100, 2 if dtype == torch.bool else 100, (6, 40), device=device).to(
        dtype
    )
    for dim in (None, 0, 1):
        ours = reduce.sum(x, dim)
        assert ours.dtype == torch.int64 and torch.equal(ours, torch.sum(x, dim))
        every = () if dim is None else dim
        assert torch.equal(reduce.amax(x, every), torch.amax(x, every)) and reduce.amax(x, every).dtype == dtype
        if dtype != torch.bool:
            assert torch.equal(reduce.argmax(x, dim), reference_argmax(x, dim))
    for result in (torch.float32, torch.float64, torch.float16, torch.int32, torch.uint8):
        assert torch.equal(reduce.sum(x, 1, dtype=result), torch.sum(x, 1, dtype=result)), result


def test_sums_beyond_float_and_int32(device: str) -> None:
    ones = torch.ones(4194304, device=device)
    with forced("reduce_full", {"TILE": 65536, "COLS": 1, "WARPS": 8, "PER_SM": 1}):
        assert reduce.sum(ones).item() == 4194304
        assert reduce.mean(ones).item() == 1
    large = torch.full((3, 1000), 2**31 - 1, dtype=torch.int32, device=device)
    assert reduce.sum(large).item() == 3000 * (2**31 - 1)
    assert reduce.sum(large, 0).tolist() == [3 * (2**31 - 1)] * 1000


@pytest.mark.parametrize(
    ("source", "result"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.float64),
    ],
)
def test_result_dtype(source: torch.dtype, result: torch.dtype, device: str) -> None:
    x = (torch.randn(40, 60, device=device) + 1).to(source)
    for ours, plain in ((reduce.sum, torch.sum), (reduce.mean, torch.mean)):
        out, theirs = ours(x, 1, dtype=result), plain(x, 1, dtype=result)
        check(out, theirs, plain(x.to(result).double(), 1))


@pytest.mark.parametrize("keepdim", [False, True])
def test_shapes(keepdim: bool, device: str) -> None:
    x = torch.randn(3, 4, 5, device=device)
    for dim in (None, (), 0, -2, (2, 0), (0, 1, 2), [1, 2]):
        for ours, plain in ((reduce.sum, torch.sum), (reduce.mean, torch.mean), (reduce.var, torch.var)):
            assert ours(x, dim, keepdim=keepdim).shape == plain(x, dim, keepdim=keepdim).shape
        if dim is not None:
            assert torch.equal(reduce.amax(x, dim, keepdim), torch.amax(x, dim, keepdim))
    for one in (None, 0, -1):
        assert torch.equal(reduce.argmax(x, one, keepdim), torch.argmax(x, one, keepdim))


def test_permuted_results_are_contiguous(device: str) -> None:
    x = torch.randn(3, 5, 6, 4, device=device).permute(2, 0, 3, 1)
    for dim in (0, 1, 2, 3, (0, 2), (1, 3), (0, 1)):
        out = reduce.sum(x, dim)
        assert out.is_contiguous()
        check(out, torch.sum(x, dim), torch.sum(x.double(), dim))
        compare(reduce.var, torch.var, x, dim)
    deep = torch.randn(2, 3, 2, 3, 2, 3, device=device) + 1
    compare(reduce.sum, torch.sum, deep, (0, 2, 4))
    compare(reduce.var, torch.var, deep, (0, 2, 4))


def test_scalars_and_empty(device: str) -> None:
    point = torch.tensor(3.5, device=device)
    for dim in (None, 0, -1):
        assert reduce.sum(point, dim).item() == reduce.mean(point, dim).item() == 3.5
        assert reduce.argmax(point, dim).item() == 0
    assert reduce.amax(point).item() == 3.5
    assert reduce.var(point, correction=0).item() == 0 and reduce.var(point).isnan()
    nothing = torch.empty(0, 4, device=device)
    assert reduce.sum(nothing).item() == 0 and torch.equal(reduce.sum(nothing, 0), torch.zeros(4, device=device))
    assert reduce.sum(nothing, 1).shape == (0,) and reduce.mean(nothing).isnan() and reduce.var(nothing).isnan()
    assert reduce.sum(nothing.int()).dtype == torch.int64
    assert reduce.amax(nothing, 1).shape == (0,)
    for empty, plain in ((reduce.amax, torch.amax), (reduce.argmax, torch.argmax)):
        with pytest.raises(IndexError) as theirs:
            plain(nothing, 0)
        with pytest.raises(IndexError) as ours:
            empty(nothing, 0)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(RuntimeError, match="could not infer output dtype"):
        reduce.mean(torch.ones(3, dtype=torch.int32, device=device))
    with pytest.raises(IndexError, match="Dimension out of range"):
        reduce.sum(point.expand(3), 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_not_a_number_wins(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(4, 70, device=device).to(dtype)
    x[1, 40] = x[1, 60] = x[2, 0] = float("nan")
    x[3] = float("-inf")
    for tiles in (False, True):
        with small_tiles() if tiles else ExitStack():
            for dim in (0, 1):
                assert torch.equal(reduce.amax(x, dim).nan_to_num(7), torch.amax(x, dim).nan_to_num(7))
                assert torch.equal(reduce.argmax(x, dim), reference_argmax(x, dim))
            assert reduce.amax(x).isnan() and reduce.argmax(x).item() == 70 + 40
            assert reduce.argmax(x, 1).tolist()[1:] == [40, 0, 0]
            assert reduce.argmax(torch.zeros(2, 200, device=device), 1).tolist() == [0, 0]


def test_variance_far_from_zero(device: str) -> None:
    x = torch.randn(3, 1500, device=device) + 1e4
    outlier = x.clone()
    outlier[:, 0] = 0
    for y in (x, outlier, x.t()):
        for dim in (None, 0, 1):
            compare(reduce.var, torch.var, y, dim, correction=0 if dim is None else 1)
    with small_tiles():
        compare(reduce.var, torch.var, x[:, :300], 1)
    half = reduce.var(x, 1, correction=0.5)
    check(half, torch.var(x, 1, correction=0.5), torch.var(x.double(), 1, correction=0.5))
    assert reduce.var(x[:, :1], 1).isnan().all() and reduce.var(x[:, :2], 1, correction=2).isinf().all()


def test_sum_to_shape(device: str) -> None:
    x = torch.randn(3, 4, 5, device=device) + 1
    for shape in ((3, 4, 5), (4, 5), (5,), (1, 4, 1), (3, 1, 5), (1,), (), (1, 1, 1)):
        out = reduce.sum_to_shape(x, shape)
        check(out, x.sum_to_size(shape), x.double().sum_to_size(shape))
    with pytest.raises(ValueError, match="does not broadcast"):
        reduce.sum_to_shape(x, (2, 5))
    y = torch.randn(1, 5, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: reduce.sum_to_shape(t.expand(3, 4, 5) * 2, (4, 1)), (y,))


def functions() -> list[tuple[str, Callable[..., torch.Tensor], Callable[..., torch.Tensor]]]:
    return [
        ("sum", lambda x: reduce.sum(x, 1), lambda x: torch.sum(x, 1)),
        ("sum all", lambda x: reduce.sum(x), lambda x: torch.sum(x)),
        ("mean", lambda x: reduce.mean(x, (0, 2), True), lambda x: torch.mean(x, (0, 2), True)),
        ("amax", lambda x: reduce.amax(x, 1), lambda x: torch.amax(x, 1)),
        ("var", lambda x: reduce.var(x, 0), lambda x: torch.var(x, 0)),
        ("var all", lambda x: reduce.var(x, correction=0), lambda x: torch.var(x, correction=0)),
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [name for name, _, _ in functions()])
def test_gradients(name: str, dtype: torch.dtype, device: str) -> None:
    ours, plain = next((ours, plain) for known, ours, plain in functions() if known == name)
    x = torch.randn(4, 6, 16, device=device).to(dtype)
    grads = []
    weight = None
    for function, leaf in ((ours, x), (plain, x), (plain, x.double())):
        leaf = leaf.clone().requires_grad_()
        out = function(leaf)
        if weight is None:
            weight = (torch.randn(out.shape, device=device) + 2).to(dtype)
        (out * weight.to(out.dtype)).sum().backward()
        grads.append(leaf.grad)
    check(*grads)


def test_gradcheck_and_ties(device: str) -> None:
    x = torch.randn(2, 3, 2, device=device, dtype=torch.float64, requires_grad=True)
    for name, ours, _ in functions():
        assert torch.autograd.gradcheck(ours, (x,), fast_mode=True), name
    assert torch.autograd.gradgradcheck(lambda t: reduce.var(t, 0), (x,), fast_mode=True)
    equal = torch.tensor([[1.0, 2, 2], [3, 3, 3]], device=device, requires_grad=True)
    reduce.amax(equal, 1).sum().backward()
    mine = equal.grad
    equal.grad = None
    torch.amax(equal, 1).sum().backward()
    assert torch.equal(mine, equal.grad)


def test_opcheck(device: str) -> None:
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    permuted = torch.randn(5, 4, 3, device=device).permute(2, 0, 1).requires_grad_()
    ops = torch.ops.ridgeline
    torch.library.opcheck(ops.sum.default, (permuted, [1], False, None))
    torch.library.opcheck(ops.var.default, (permuted, [0], 1.0, False))
    torch.library.opcheck(ops.sum.default, (x, None, True, torch.float64))
    torch.library.opcheck(ops.mean.default, (x, [0, 2], True, None))
    torch.library.opcheck(ops.amax.default, (x, [1], False))
    torch.library.opcheck(ops.argmax.default, (x.detach(), 1, False))
    torch.library.opcheck(ops.var.default, (x, [-1], 1.0, False))


def test_stand_ins(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 5, 6, device=device)

    def stand_in(function: Any, *args: Any, **kwargs: Any) -> Any:
        return REPLACEMENTS[function][1](*args, **kwargs)

    assert stand_in(torch.sum, x) is NotImplemented, "no line in the table"
    monkeypatch.setattr(replace, "_everywhere", True)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.sum, (), {}), (torch.sum, (1,), {}), (torch.sum, ((0, -1), True), {}), (torch.sum, (), {"dtype": torch.float64}),
        (torch.Tensor.sum, (0,), {}), (torch.mean, (), {}), (torch.mean, (-1, True), {}), (torch.Tensor.mean, ((0, 1),), {}),
        (torch.amax, (), {}), (torch.amax, (1, True), {}), (torch.Tensor.amax, ((0, 2),), {}), (torch.argmax, (), {}),
        (torch.argmax, (1,), {}), (torch.Tensor.argmax, (-1, True), {}), (torch.var, (), {}), (torch.var, (False,), {}),
        (torch.var, (1,), {}), (torch.var, (1, False), {}), (torch.var, (1, True, True), {}), (torch.var, ((0, 1),), {"correction": 0}),
        (torch.Tensor.var, (), {"dim": 0, "keepdim": True}), (torch.Tensor.var, (0,), {"unbiased": False}),
    ]  # fmt: skip
    for function, args, kwargs in calls:
        ours, plain = stand_in(function, x, *args, **kwargs), function(x, *args, **kwargs)
        assert ours.shape == plain.shape and ours.dtype == plain.dtype, (function, args, kwargs)
        torch.testing.assert_close(ours, plain)
    for function, args, kwargs in (
        (torch.sum, (7,), {}), (torch.sum, ((0, 0),), {}), (torch.sum, ("x",), {}), (torch.sum, (0,), {"out": x}), (torch.sum, (0, 1), {}),
        (torch.mean, (0,), {"dtype": torch.int32}), (torch.amax, (None,), {}), (torch.argmax, ((0, 1),), {}), (torch.var, (0, 2), {}),
    ):  # fmt: skip
        assert stand_in(function, x, *args, **kwargs) is NotImplemented, (function, args, kwargs)
    assert stand_in(torch.mean, x.int()) is NotImplemented and stand_in(torch.var, x.int()) is NotImplemented
    assert stand_in(torch.sum, x.to(torch.complex64)) is NotImplemented


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_beyond_int32(dtype: torch.dtype) -> None:
    x = torch.ones(2**31 + 4096, dtype=dtype, device="cuda")
    x[-1] = 3
    assert reduce.sum(x, dtype=torch.int64 if dtype == torch.int8 else torch.float64).item() == 2**31 + 4096 + 2
    assert reduce.argmax(x).item() == 2**31 + 4095
    wide = x.view(2**19 + 1, 4096)
    rounded = torch.tensor(4098, dtype=torch.int64 if dtype == torch.int8 else dtype).item()  # bfloat16 has no 4098
    assert reduce.sum(wide, 1)[-1].item() == rounded
    assert reduce.sum(wide, 0, dtype=torch.int64 if dtype == torch.int8 else torch.float32)[-1].item() == 2**19 + 3
    assert reduce.amax(x).item() == 3


@needs_gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 512, 896), None), ((4, 512, 896), (0, 1)), ((64, 1000, 1001), 1), ((8, 1 << 20), -1)], ids=str
)
def test_large(shape: tuple[int, ...], dim: Any, dtype: torch.dtype) -> None:
    x = (torch.randn(shape, device="cuda") + 1).to(dtype)
    if dtype == torch.float16:
        x *= 0.01  # the sums of ones would be infinite
    compare(reduce.sum, torch.sum, x, dim)
    compare(reduce.var, torch.var, x, dim)
    assert torch.equal(reduce.sum(x, dim), reduce.sum(x, dim))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = reduce.sum(x, dim)
    graph.replay()
    check(captured, torch.sum(x, dim), torch.sum(x.double(), dim))


@pytest.mark.parametrize("launches", [1, 2], ids=["one launch", "two launches"])
def test_nothing_but_the_lowest_number(launches: int, device: str) -> None:
    """Maxima start from it: one more would be found in its place, and its index nowhere."""
    for dtype in (torch.int64, torch.int32, torch.float32):
        lowest = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
        x = torch.full((2, 80), lowest, dtype=dtype, device=device)
        with small_tiles(launches):
            assert (reduce.amax(x, 1) == lowest).all() and (reduce.amax(x, 0) == lowest).all()
            assert not reduce.argmax(x, 1).any() and not reduce.argmax(x, 0).any()


def test_every_stream_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of two streams run at the same time, and one counter for both would end one of them early."""
    monkeypatch.setattr(reduce_launch, "_counters", {})
    places = iter(((0, 7), (0, 8), (1, 7), (0, 7)))
    found = []
    for index, stream in places:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device, stream=stream: stream, raising=False)
        tensor: Any = SimpleNamespace(device="cpu", get_device=lambda index=index: index)
        found.append(reduce_launch._counter(tensor))
    assert len({counter.data_ptr() for counter in found}) == 3 and found[0] is found[3]


@jit
def _outputs_of_a_block(numbers, live_out, at, kept, k_units, sb, sk, AXIS: tl.constexpr, KEPT: tl.constexpr, FLAT: tl.constexpr,  # type: ignore[no-untyped-def]
                        ALIGN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) + at
    q, live, begin = reduce_kernels._place(at, tl.program_id(2), kept, k_units, sb, sk, AXIS, KEPT, FLAT, ALIGN, WIDE)
    lanes = tl.arange(0, KEPT)
    tl.store(numbers + lanes, q)
    tl.store(numbers + KEPT + lanes, begin)
    tl.store(live_out + lanes, live.to(tl.int32))


@pytest.mark.parametrize(
    ("shape", "dims", "wide"),
    [((2, 2**31), (0,), True), ((2**31 + 64, 2), (1,), True), ((2, 2**31 - 104), (0,), True), ((2, 2**31 - 4096), (0,), False)],
)
def test_more_outputs_than_an_int32_counts(shape: tuple[int, int], dims: tuple[int], wide: bool, device: str) -> None:
    """What the first and the last block would write and read; nothing as large is made."""
    p = reduce_plan.plan(shape, (shape[1], 1), dims)
    assert p is not None
    cut = reduce_plan.schedule(p, reduce_plan.default(p, 2), 2)
    assert cut.wide == wide
    for at in (0, cut.grid[0] - 1):
        numbers = torch.zeros(2, cut.tile_kept, dtype=torch.int64, device=device)
        live = torch.zeros(cut.tile_kept, dtype=torch.int32, device=device)
        _outputs_of_a_block[(1,)](numbers, live, at, p.kept, cut.k_units, p.sb, p.sk, AXIS=p.axis, KEPT=cut.tile_kept, FLAT=cut.flat,
                                  ALIGN=p.align, WIDE=cut.wide)  # fmt: skip
        expected = at * cut.tile_kept + torch.arange(cut.tile_kept, device=device)
        assert torch.equal(numbers[0], expected) and torch.equal(numbers[1], expected * p.sk)
        assert torch.equal(live.bool(), expected < p.kept)


def test_wide_kernels_reduce_as_others_do(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only huge tensors take, on small ones."""
    x = torch.randn(3, 40, 8, device=device)
    plain = [(of(x, dim)) for of in (reduce.sum, reduce.amax, reduce.argmax, reduce.var) for dim in (0, 1, 2)]
    schedule = reduce_plan.schedule
    monkeypatch.setattr(reduce_launch, "schedule", lambda *given: dataclasses.replace(schedule(*given), wide=True))
    monkeypatch.setattr(reduce_launch, "_calls", {})
    for launches in (1, 2):
        with small_tiles(launches):
            found = [(of(x, dim)) for of in (reduce.sum, reduce.amax, reduce.argmax, reduce.var) for dim in (0, 1, 2)]
        torch.testing.assert_close(found, plain)
    assert all(call is not None and call.stages[0].constants["WIDE"] for call in reduce_launch._calls.values())


def test_sums_under_the_autocast_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 of half types, as torch's own; a GPU's tensors without a GPU."""
    stand_in = REPLACEMENTS[torch.sum][1]
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with replace.everywhere():
        assert stand_in(x, 0).dtype == stand_in(x).dtype == torch.float32
        assert stand_in(x, 0, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert stand_in(x.double(), 0).dtype == torch.float64
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
        assert stand_in(x, 0).dtype == torch.bfloat16
