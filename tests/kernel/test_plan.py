"""Launches kept with a plan: the right compiled kernel for the tensors at hand, and none for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernel import jit
from ridgeline.kernel.plan import Plan, planned, start
from ridgeline.kernel.tuning import config, forced, placed


class Compiled:
    """Stands for a compiled kernel: writes down what it is run with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.run = lambda *args: calls.append(args)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """(launches through Triton, later ones)."""
    slow: list[Any] = []
    quick: list[Any] = []

    def by_triton(kernel: Any, grid: Any, args: Any, constants: Any) -> Compiled:
        slow.append((grid, args, constants))
        return Compiled(quick)

    monkeypatch.setattr(jit, "INTERPRETED", False)
    monkeypatch.setattr(jit, "HAVE_TRITON", True)
    monkeypatch.setattr(jit, "_ready", {})
    monkeypatch.setattr(jit, "_prompt", {})
    monkeypatch.setattr(jit, "_launch_by_triton", by_triton)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return slow, quick


class Parameter:
    def __init__(self, name: str, is_constexpr: bool) -> None:
        self.name, self.is_constexpr, self.default = name, is_constexpr, None


class Kernel:
    params = tuple(Parameter(name, name == "BLOCK") for name in ("x", "y", "n", "eps", "BLOCK"))


def plan() -> Plan:
    return Plan("", (), {}, {}, Kernel(), (3, 2), (64,), {"BLOCK": 32, "num_warps": 4})


def test_the_second_launch_goes_straight_to_the_compiled_kernel(launched: tuple[list[Any], list[Any]]) -> None:
    slow, quick = launched
    one, x, y = plan(), torch.zeros(64), torch.zeros(64)
    start(one, (x, y), (0.5,))
    assert len(slow) == 1 and not quick
    assert slow[0] == ((3, 2), (x, y, 64, 0.5), {"BLOCK": 32, "num_warps": 4})
    start(one, (y, x), (0.25,))
    assert len(slow) == 1
    assert quick == [(3, 2, 1, 7, "function", "metadata", None, None, None, y.data_ptr(), x.data_ptr(), 64, 0.25, 32)]


class Descriptor:
    """Stands for a tensor descriptor."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.block_shape = base, [16, 16]


def test_descriptors_come_first_and_may_differ_from_launch_to_launch(launched: tuple[list[Any], list[Any]]) -> None:
    slow, quick = launched
    one, x = plan(), torch.zeros(64)
    first, second = Descriptor(x), Descriptor(torch.ones(64))
    start(one, (x,), (0.5,), (first,))
    start(one, (x,), (0.5,), (second,))
    assert [args for _, args, _ in slow] == [(first, x, 64, 0.5)]
    assert quick == [(3, 2, 1, 7, "function", "metadata", None, None, None, second, x.data_ptr(), 64, 0.5, 32)]


def products() -> dict[str, Any]:
    """Operators whose launch is kept, as functions that launch with fresh tensors and give them back."""
    pytest.importorskip("triton")
    from ridgeline.kernel import cross_entropy, gemv_kernels, matmul_kernels, weight_only, weight_only_kernels

    def halves(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    def matmul(chosen: int) -> Any:
        with forced("matmul", matmul_kernels.CANDIDATES[chosen]):
            matmul_kernels.run_matmul(halves(256, 128), halves(128, 256), halves(256, 256), (256, 256, 128), (128, 1))

    return {
        "matmul by TMA": lambda: matmul(0),
        "matmul by pointers": lambda: matmul(8),
        "int8": lambda: weight_only_kernels.run_int8(halves(1, 256), *weight_only.quantize_int8(halves(64, 256)), None),
        "gemv": lambda: gemv_kernels.run_gemv(halves(1, 256), halves(64, 256), None, None, None, False, None, 0.0, 1),
        "int4": lambda: gemv_kernels.run_nibbles(
            halves(1, 256), *weight_only.quantize_int4(halves(64, 256)), 128, None, None, False, None, 0.0
        ),
        "cross entropy": lambda: cross_entropy._forward(
            halves(8, 64), torch.zeros(8, dtype=torch.int64), -100, 0.1, cross_entropy.MEAN, False
        ),
    }


@pytest.mark.skipif(jit.INTERPRETED, reason="interpreted kernels are never compiled")
@pytest.mark.parametrize("name", ["matmul by TMA", "matmul by pointers", "int8", "gemv", "int4", "cross entropy"])
def test_a_kept_launch_is_the_first_one_again(launched: tuple[list[Any], list[Any]], name: str) -> None:
    """Sizes, numbers and constants of the second launch are those of the first, place by place; tensors are addresses."""
    slow, quick = launched
    run = products()[name]
    run()
    kernels = len(slow)
    run()
    assert kernels and len(slow) == kernels and len(quick) == kernels
    for (grid, args, constants), later in zip(slow, quick, strict=True):
        assert later[: len(grid)] == grid
        given = later[9 : 9 + len(args)]
        for before, after in zip(args, given, strict=True):
            if isinstance(before, torch.Tensor):
                assert isinstance(after, int) and after % 16 == 0
            elif hasattr(before, "block_shape"):
                assert (after.block_shape, after.shape, after.strides) == (before.block_shape, before.shape, before.strides)
            else:
                assert after == before and type(after) is type(before)
        assert set(later[9 + len(args) :]) <= {*constants.values(), None}


@pytest.mark.parametrize(
    "other", [lambda x: x.double(), lambda x: x.new_zeros(80)[1:65], lambda x: None], ids=["dtype", "unaligned", "missing"]
)
def test_another_kind_of_tensor_does_not_get_the_same_kernel(launched: tuple[list[Any], list[Any]], other: Any) -> None:
    slow, quick = launched
    one, x = plan(), torch.zeros(64)
    start(one, (x, x), (0.5,))
    start(one, (x, other(x)), (0.5,))
    assert len(slow) == 2 and not quick


def test_each_device_has_a_kernel_and_a_stream_of_its_own(launched: tuple[list[Any], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = launched
    one, x = plan(), torch.zeros(64)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device)
    for device in (0, 1, 1, 0):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device)
        start(one, (x, x), (0.5,))
    assert len(slow) == 2 and [call[3] for call in quick] == [71, 70]


def test_an_empty_grid_starts_nothing(launched: tuple[list[Any], list[Any]]) -> None:
    slow, quick = launched
    x = torch.zeros(64)
    start(Plan("", (), {}, {}, Kernel(), (0,), (0,), {"BLOCK": 32}), (x, x), (0.5,))
    assert not slow and not quick


def test_what_follows_is_started_with_the_same_tensors_and_its_own_sizes(launched: tuple[list[Any], list[Any]]) -> None:
    slow, quick = launched
    after = Plan("", (), {}, {}, Kernel(), (1,), (9,), {"BLOCK": 8})
    both, x, y = Plan("", (), {}, {}, Kernel(), (3, 2), (64,), {"BLOCK": 32}, after), torch.zeros(64), torch.zeros(64)
    start(both, (x, y), (0.5,))
    start(both, (y, x), (0.5,))
    assert slow == [((3, 2), (x, y, 64, 0.5), {"BLOCK": 32}), ((1,), (x, y, 9, 0.5), {"BLOCK": 8})]
    found = [(call[:4], call[9:]) for call in quick]
    assert found == [
        ((3, 2, 1, 7), (y.data_ptr(), x.data_ptr(), 64, 0.5, 32)),
        ((1, 1, 1, 7), (y.data_ptr(), x.data_ptr(), 9, 0.5, 8)),
    ]
    start(both, (x.new_zeros(80)[1:65], y), (0.5,))  # unaligned: both through Triton again
    start(Plan("", (), {}, {}, Kernel(), (0,), (0,), {"BLOCK": 32}, after), (x, y), (0.5,))  # nothing of the first, the second all the same
    assert [grid for grid, _, _ in slow] == [(3, 2), (1,), (3, 2), (1,)]
    assert [call[:3] for call in quick] == [(3, 2, 1), (1, 1, 1), (1, 1, 1)]


def test_recorded_launches_are_seen_by_triton(launched: tuple[list[Any], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    slow, _ = launched
    one, x = plan(), torch.zeros(64)
    start(one, (x, x), (0.5,))
    monkeypatch.setattr(jit, "_recorder", [])
    start(one, (x, x), (0.5,))
    assert len(slow) == 2


def test_plans_are_kept_until_there_are_many() -> None:
    plans: dict[Any, Plan] = {}
    first = planned(plans, "a", plan)
    assert planned(plans, "a", plan) is first and planned(plans, "b", plan) is not first
    for number in range(1100):
        planned(plans, number, plan)
    assert len(plans) <= 1024


def test_a_configuration_placed_for_a_bucket_holds_there_alone() -> None:
    usual, other = {"bn": 1}, {"bn": 2}
    assert config("op", (1, 2), usual) is usual
    with placed("op", (1, 2), other):
        assert config("op", (1, 2), usual) is other and config("op", (1, 3), usual) is usual
    assert config("op", (1, 2), usual) is usual
    with placed("op", (9,), other):
        pass
    assert config("op", (9,), usual) is usual
