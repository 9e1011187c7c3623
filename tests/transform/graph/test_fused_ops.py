"""The ops for GPUs: plain torch on CPUs, transparent to torch.compile, kept by torch.export, our kernel only where it wins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.kernel import replace
from ridgeline.transform.graph import fused_ops

B, H, K, T, D = 2, 4, 2, 5, 8


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)


class All(nn.Module):
    """Every op once."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k = fused_ops.graph_rope(q, k, cos, sin, False, 2)
        q = fused_ops.graph_rope_one(q, cos, sin, False, 2)
        y, total = fused_ops.graph_add_rms_norm(q, q * 2.0, w, 1e-3)
        return fused_ops.graph_swiglu(y, total), fused_ops.graph_rms_norm(k, w, 1e-3)


def inputs() -> list[Tensor]:
    return tensors((B, H, T, D), (B, K, T, D), (T, D), (T, D), (D,))


def expected(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x * cos + half(x) * sin for x in (q, k))
    total = 3.0 * (q * cos + half(q) * sin)
    y = total / torch.sqrt(total.square().mean(-1, keepdim=True) + 1e-3) * w
    return functional.silu(y) * total, k / torch.sqrt(k.square().mean(-1, keepdim=True) + 1e-3) * w


def test_the_formulas() -> None:
    for found, wanted in zip(All()(*inputs()), expected(*inputs()), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_compile_looks_inside() -> None:
    seen: list[str] = []

    def backend(module: Any, example: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(graph: Any, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        return aot_autograd(fw_compiler=compiler)(module, example)

    with torch.no_grad():
        found = torch.compile(All(), backend=backend)(*inputs())
    for one, other in zip(found, expected(*inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert seen
    assert not [name for name in seen if "ridgeline" in name]


def test_export_runs_again() -> None:
    program = torch.export.export(All(), tuple(inputs()))
    for one, other in zip(program.module()(*inputs()), expected(*inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_flow() -> None:
    given = [value.requires_grad_() for value in inputs()]
    sum(value.sum() for value in All()(*given)).backward()
    assert all(value.grad is not None for value in given)


def test_the_kernel_runs_only_where_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(fused_ops, "without_gradient", lambda *args: True)
    monkeypatch.setattr(fused_ops, "worth", lambda op, x, size, kind="": bool(asked.append((op, size))) or size > 100)
    monkeypatch.setattr(fused_ops, "swiglu", lambda gate, up: gate * 0.0 + 7.0)
    (small,), (large,) = tensors((2, 5)), tensors((20, 10))
    assert torch.equal(fused_ops.graph_swiglu(small, small), functional.silu(small) * small)
    assert (fused_ops.graph_swiglu(large, large) == 7.0).all()
    assert asked == [("swiglu", 10), ("swiglu", 200)]


def test_shipped_tables_know_the_ops() -> None:
    """The names asked for are lines of the shipped table: a renamed op would silently never win."""
    lines = replace.parse_wins(replace.read(replace.TABLES / "nvidia-h200-wins.json"))
    assert {"rope", "swiglu", "add_rms_norm", "rms_norm"} <= {op for op, _, _ in lines}
