"""capture(): roles, views, aliasing, liveness, the dispatch fallback, nested graphs, and errors a user meets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import capture
from ridgeline.core.errors import CaptureError, ModelFileError, OptionError, UnknownNameError
from ridgeline.workload.graph import Op


def ops_of(workload: object, kind: str) -> list[Op]:
    return [op for op in workload.ops if op.kind == kind]  # type: ignore[attr-defined]


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)  # type: ignore[operator]


def test_each_operand_is_counted_once() -> None:
    x = torch.randn(8, 16)
    square = capture(Function(lambda x: x * x), x).ops[0]
    assert (len(square.inputs), square.bytes, square.flops) == (1, 2 * 8 * 16 * 4, 128)


def test_disjoint_views_of_one_storage_all_count() -> None:
    workload = capture(Function(lambda x: torch.nn.functional.scaled_dot_product_attention(*x.chunk(3, -1))), torch.randn(2, 4, 8, 48))
    attention = ops_of(workload, "attention")[0]
    assert attention.bytes == 4 * (2 * 4 * 8 * 48 + 2 * 4 * 8 * 16)


def test_broadcast_operands_are_stored_once() -> None:
    workload = capture(Function(lambda x, b: x + b.expand(8, 16)), (torch.randn(8, 16), torch.randn(1, 16)))
    add = ops_of(workload, "pointwise")[0]
    assert add.bytes == 4 * (8 * 16 + 16 + 8 * 16)


def test_views_move_nothing_and_copies_do() -> None:
    workload = capture(Function(lambda x: x.transpose(0, 1).reshape(-1) + 1), torch.randn(8, 16))
    kinds = [op.kind for op in workload.ops]
    assert kinds == ["view", "copy", "pointwise"]
    assert workload.ops[0].bytes == 0 and workload.ops[1].bytes == 2 * 8 * 16 * 4


def test_in_place_write_touches_only_what_it_writes() -> None:
    class Cache(nn.Module):
        def forward(self, x: torch.Tensor, position: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
            kv_cache.index_copy_(1, position, x)
            return kv_cache.sum()

    workload = capture(Cache(), (torch.randn(2, 1, 8), torch.tensor([3]), torch.randn(2, 64, 8)))
    write = ops_of(workload, "copy")[0]
    assert write.bytes_of("kv_cache") == 2 * 1 * 8 * 4
    assert ops_of(workload, "reduction")[0].bytes_of("kv_cache") == 2 * 64 * 8 * 4


def test_embedding_reads_only_the_rows_it_returns() -> None:
    embedding = capture(nn.Embedding(1000, 32), torch.zeros(4, dtype=torch.long)).ops[0]
    assert embedding.bytes_of("weights") == 4 * 32 * 4


def test_peak_memory_is_the_largest_live_set() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x)  # x and a alive
        b = torch.cat([a, a])  # a and b alive: 3 units
        return b.sum()

    workload = capture(Function(chain), torch.randn(1024))
    assert workload.peak_activation_bytes == 3 * 4096


def test_peak_memory_equals_what_an_interpreter_holds() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten(), nn.Linear(4 * 15 * 15, 10)
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    sizes = {"x": x.numel(), "conv": 2 * 8 * 32 * 32, "relu": 2 * 8 * 32 * 32, "second": 2 * 4 * 15 * 15, "out": 20}
    live = [("x", "conv"), ("conv", "relu"), ("relu", "second"), ("second", "out")]
    assert capture(model, x).peak_activation_bytes == 4 * max(sum(sizes[n] for n in names) for names in live)


def test_data_dependent_model_falls_back_to_one_recorded_run() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(8, 4), nn.Linear(8, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.small(x) if x.sum().item() > 0 else self.large(x)

    workload = capture(Branch(), torch.ones(2, 8))
    assert workload.captured_by == "dispatch" and "torch.export" in workload.notes[0]
    assert workload.matmul_flops == 2 * 2 * 8 * 4
    linear = ops_of(workload, "linear")[0]
    assert linear.layer == "small" and linear.bytes_of("weights") == 4 * (8 * 4 + 4)
    assert capture(Branch(), -torch.ones(2, 8)).matmul_flops == 2 * 2 * 8 * 32


def test_nested_no_grad_graph_is_walked() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = self.a(x)
            return self.b(torch.relu(y))

    workload = capture(Frozen(), torch.randn(2, 8))
    assert workload.matmul_flops == 2 * 2 * (2 * 8 * 8) and not workload.uncounted


def test_unknown_operator_is_listed_and_kept() -> None:
    workload = capture(Function(lambda x: torch.linalg.svdvals(x)), torch.randn(8, 8))
    assert [u.zero_flop for u in workload.uncounted] == [False]
    assert any(op.kind == "other" and op.bytes > 0 for op in workload.ops)


def test_module_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    model.train()
    workload = capture(model, torch.randn(2, 4))
    assert model.training and all(m.training for m in model)
    assert [op.kind for op in workload.ops] == ["linear", "view"]  # dropout does nothing in inference


@given(
    batch=st.integers(1, 3), groups=st.integers(1, 3), c=st.integers(1, 4), k=st.integers(1, 4), size=st.integers(5, 12),
    kernel=st.integers(1, 4), stride=st.integers(1, 3), padding=st.integers(0, 2), dilation=st.integers(1, 2), transposed=st.booleans(),
)  # fmt: skip
def test_any_convolution_equals_torch(
    batch: int, groups: int, c: int, k: int, size: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool
) -> None:
    if not transposed and size + 2 * padding < dilation * (kernel - 1) + 1:
        return
    if transposed and (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 < 1:
        return
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    module = kind(c * groups, k * groups, kernel, stride, padding, groups=groups, dilation=dilation)
    x = torch.randn(batch, c * groups, size, size)
    op = capture(module, x).ops[0]
    # brute force: every multiplication of the loop nest, once
    out = module(x)
    positions = x.shape[-1] ** 2 if transposed else out.shape[-1] ** 2
    assert op.flops == 2 * batch * groups * c * k * positions * kernel**2 == 2 * op.loops[0].macs
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert op.flops == counter.get_total_flops()


@given(
    shape=st.sampled_from(
        [
            ((3, 4), (4, 5)),
            ((2, 3, 4), (4, 5)),
            ((2, 3, 4), (2, 4, 5)),
            ((1, 3, 4), (6, 4, 5)),
            ((4,), (4, 5)),
            ((3, 4), (4,)),
            ((4,), (4,)),
        ]
    )
)
def test_any_matmul_equals_torch(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.randn(s) for s in shape)
    workload = capture(Function(torch.matmul), (a, b))
    out = torch.matmul(a, b)
    assert workload.matmul_flops == 2 * out.numel() * a.shape[-1]


@pytest.mark.parametrize(
    "build",
    [lambda: nn.LSTM(8, 16, 2, batch_first=True), lambda: nn.GRU(8, 16), lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)],
)
def test_torch_layers_equal_torch_counts(build: object) -> None:
    module = build().eval()  # type: ignore[operator]
    x = torch.randn(3, 5, 16 if isinstance(module, nn.TransformerEncoderLayer) else 8)
    workload = capture(module, x)
    d = 16
    expected = {
        "LSTM": 2 * 15 * 4 * 16 * (8 + 16 + 16 + 16),
        "GRU": 2 * 15 * 3 * 16 * (8 + 16),
        "TransformerEncoderLayer": 2 * 15 * (4 * d * d + 2 * d * 32) + 2 * 2 * 3 * 2 * 5 * 5 * 8,
    }[type(module).__name__]
    assert workload.matmul_flops == expected and not workload.uncounted


def test_relabelled_dtypes_change_bytes_only() -> None:
    module, x = nn.Linear(64, 32, bias=False), torch.randn(8, 64)
    full = capture(module, x)
    small = capture(module, x, dtype="int8")
    assert small.flops == full.flops and small.bytes * 4 == full.bytes
    weights = full.with_dtype("int4", ("weights",))
    assert weights.bytes_of("weights") * 8 == full.bytes_of("weights") and weights.bytes_of("activations") == full.bytes_of("activations")
    assert weights.ops[0].dtype == "float32"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: capture("resnet81"), UnknownNameError, "resnet18"),
        (lambda: capture("no/such/model.onnx"), ModelFileError, "no such file"),
        (lambda: capture("weights.pt"), ModelFileError, "run code"),
        (lambda: capture("program.pt2"), ModelFileError, "run code"),
        (lambda: capture("weights.pkl"), ModelFileError, "run code"),
        (lambda: capture("net.py"), ModelFileError, "function_name"),
        (lambda: capture(nn.Linear(4, 4)), OptionError, "example inputs"),
        (lambda: capture(nn.Linear(4, 4), torch.randn(2, 5)), CaptureError, "does not run"),
        (lambda: capture("resnet18", dtype="float23"), OptionError, "float16"),
        (lambda: capture("resnet18", batch=0), OptionError, "batch"),
        (lambda: capture("resnet18", phase="decode"), OptionError, "phase"),
    ],
)
def test_bad_input_is_named(call: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()  # type: ignore[operator]
    assert words in str(caught.value)
    assert "why:" in str(caught.value) and "do:" in str(caught.value)


def test_copies_into_a_tensor_do_not_read_it() -> None:
    class Store(nn.Module):
        def forward(self, x: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
            kv_cache[:, 1:2].copy_(x)
            return kv_cache.sum()

    workload = capture(Store(), (torch.randn(2, 1, 8), torch.randn(2, 64, 8)))
    assert ops_of(workload, "copy")[0].bytes_of("kv_cache") == 2 * 8 * 4


def test_experts_are_read_no_further_than_rows_reach() -> None:
    from ridgeline.workload.formulas import Call, cost_of
    from ridgeline.workload.tensors import TensorInfo

    rows, experts = TensorInfo("x", "activations", (3, 16), "float32"), TensorInfo("w", "weights", (8, 16, 32), "float32")
    cost = cost_of(Call("_grouped_mm", (rows, experts), {}, (TensorInfo("y", "activations", (3, 32), "float32"),)))
    assert cost is not None and cost.flops == 2 * 3 * 16 * 32
    assert [o.elements for o in cost.reads or ()] == [3 * 16, 3 * 16 * 32]
