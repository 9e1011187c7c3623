"""Whether ours take the place of torch's: the table, who may change that and for whom, and what is put back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ridgeline.kernel import jit, overlap, replace
from ridgeline.kernel.replace import Win, parse_wins, worth
from ridgeline.kernel.use import use_kernels

LINES = {
    "softmax||float32": {"eager": 100, "compile": 1000},
    "softmax|wide|float32": {"eager": 10, "compile": None},
    "softmax||bfloat16": {"eager": None, "compile": 50},
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_wins", parse_wins(LINES))


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    """On a GPU, as far as anybody can see."""
    with FakeTensorMode():
        yield torch.empty(4, device="cuda")


def asked(x: torch.Tensor, *, kind: str = "", compiled: bool = False, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The least size for which the answer is yes."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: compiled)
        return next((size for size in (9, 10, 49, 50, 99, 100, 999, 1000) if worth("softmax", x, size, kind)), None)


def test_lines_are_parsed() -> None:
    assert parse_wins(LINES) == {
        ("softmax", "", torch.float32): Win(100, 1000),
        ("softmax", "wide", torch.float32): Win(10, None),
        ("softmax", "", torch.bfloat16): Win(None, 50),
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "compiled", "least"),
    [
        ("", torch.float32, False, 100),
        ("", torch.float32, True, 1000),
        ("wide", torch.float32, False, 10),
        ("wide", torch.float32, True, None),
        ("", torch.bfloat16, False, None),
        ("", torch.bfloat16, True, 50),
        ("wide", torch.bfloat16, True, None),  # the line without a kind is no line for this one
        ("narrow", torch.float32, False, None),
        ("", torch.float16, False, None),
    ],
)
def test_the_least_size_is_that_of_the_line(table: None, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype,
                                            compiled: bool, least: int | None) -> None:  # fmt: skip
    assert asked(x.to(dtype), kind=kind, compiled=compiled, monkeypatch=monkeypatch) == least


def test_only_on_a_gpu(table: None, x: torch.Tensor) -> None:
    on_cpu = torch.empty(4)
    assert worth("softmax", x, 100) and not worth("softmax", on_cpu, 100) and not worth("other", x, 100)
    with replace.everywhere():
        assert worth("other", x, 1) and worth("other", on_cpu, 1) is jit.INTERPRETED


def test_nowhere_is_for_the_table_and_everywhere_for_tests(table: None, x: torch.Tensor) -> None:
    with replace.nowhere():
        assert not worth("softmax", x, 100)
        with replace.nowhere():
            pass
        assert not worth("softmax", x, 100)
        with replace.everywhere():
            assert worth("softmax", x, 1)
    assert worth("softmax", x, 100) and not worth("softmax", x, 1)


def test_nothing_while_saved_tensors_go_through_hooks(table: None, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of a checkpoint, whose part of the model runs again in backward."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        assert asked(x, monkeypatch=monkeypatch) is None
        assert asked(x, compiled=True, monkeypatch=monkeypatch) == 1000
        with replace.everywhere():
            assert not worth("softmax", x, 100)
    assert asked(x, monkeypatch=monkeypatch) == 100


def test_the_devices_table_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def reading(path: Path) -> dict[str, Any]:
        read.append(path)
        return LINES

    monkeypatch.setattr(replace, "_wins", {})
    monkeypatch.setattr(replace, "_loaded", False)
    monkeypatch.setattr(replace, "read", reading)
    monkeypatch.setattr(replace, "device_slug", lambda: "some-gpu")
    replace.load_wins()
    replace.load_wins()
    assert [path.name for path in read] == ["some-gpu-wins.json"] and replace._wins == parse_wins(LINES)


def overlapping(block: Callable[[], AbstractContextManager[None]], flag: Callable[[], Any]) -> tuple[Any, Any]:
    """(what another thread sees while one is inside, what is left of two blocks of two threads that begin and end in turn)."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen: list[Any] = []

    def first() -> None:
        with block():
            first_in.set()
            second_in.wait(10)
        first_out.set()

    def second() -> None:
        first_in.wait(10)
        seen.append(flag())
        with block():
            second_in.set()
            first_out.wait(10)
        seen.append(flag())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen[0], (seen[1], flag())


def test_blocks_of_two_threads_leave_nothing_behind() -> None:
    assert overlapping(replace.nowhere, lambda: replace._thread.nowhere) == (False, (False, False))
    assert overlapping(overlap.weights_are_still, overlap.are_still) == (False, (False, False))
    assert overlapping(replace.everywhere, lambda: bool(replace._everywhere)) == (True, (False, False))  # for all threads


def test_the_promise_holds_inside() -> None:
    with overlap.weights_are_still():
        assert overlap.are_still()
        with overlap.weights_are_still():
            pass
        assert overlap.are_still()
    assert not overlap.are_still()


class Model(nn.Module):
    def forward(self, ids: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Twice as much."""
        return functional.softmax(ids * scale, -1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_uses_of_a_model_are_undone_in_any_order(order: tuple[int, int]) -> None:
    model = nn.Sequential(Model(), nn.BatchNorm1d(4), nn.ReLU())
    both = use_kernels(model), use_kernels(model)
    x = torch.randn(3, 4)
    expected = model(x)
    both[order[0]].undo()
    assert "forward" in vars(model)
    torch.testing.assert_close(model(x), expected)
    both[order[1]].undo()
    assert "forward" not in vars(model)
    both[order[1]].undo()
    assert "forward" not in vars(model)


def test_undo_leaves_what_others_put_over_ours_and_is_plain_below() -> None:
    model = Model()
    kernels = use_kernels(model)
    ours = model.forward
    model.forward = lambda ids: ours(ids) + 1  # type: ignore[method-assign, assignment]
    kernels.undo()
    depths: list[int] = []
    handle = functional.softmax
    x = torch.zeros(2, 4)
    assert torch.equal(model(x), handle(x, -1) + 1)
    model.register_forward_pre_hook(lambda module, args: depths.append(torch._C._len_torch_function_stack()))
    model(x)
    assert depths == [0] and ours.trials == {}  # type: ignore[attr-defined]


def test_a_forward_of_the_modules_own_comes_back() -> None:
    model = Model()
    own = model.forward = lambda ids: ids + 1  # type: ignore[method-assign, assignment]
    kernels = use_kernels(model)
    assert float(model(torch.zeros(1))) == 1 and model.forward is not own
    kernels.undo()
    assert model.forward is own


def test_the_forward_keeps_its_signature() -> None:
    model = Model()
    kernels = use_kernels(model)
    assert str(inspect.signature(model.forward)) == "(ids: 'torch.Tensor', scale: 'float' = 2.0) -> 'torch.Tensor'"
    assert model.forward.__name__ == "forward" and model.forward.__doc__ == "Twice as much."
    kernels.undo()


@pytest.mark.parametrize("strict", [False, True])
def test_export_takes_dynamic_shapes_by_name(strict: bool) -> None:
    model = Model()
    kernels = use_kernels(model)
    exported = torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes={"ids": {0: torch.export.Dim("batch")}}, strict=strict)
    x = torch.randn(7, 8)
    torch.testing.assert_close(exported.module()(x), functional.softmax(2 * x, -1))
    kernels.undo()


def test_plain_tensors_are_torchs_own_laid_out_by_strides() -> None:
    class Sub(torch.Tensor):
        pass

    with FakeTensorMode():
        fake = torch.empty(4)
    assert replace.plain((fake, nn.Parameter(torch.ones(2)), None, 3, (1, 2), "a"))
    others = [torch.ones(2).as_subclass(Sub), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]
    others += [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout) for layout in (torch.strided, torch.jagged)]
    assert not any(replace.plain((torch.ones(2), other)) for other in others)
