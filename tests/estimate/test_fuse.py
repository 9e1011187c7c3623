"""Fused mode: FLOPs are kept, bytes between members vanish, and what must not fuse does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline import capture, estimate
from ridgeline.estimate.fuse import fuse
from tests.estimate.support import pointwise, processor


def test_a_pointwise_chain_reads_and_writes_once() -> None:
    chain = [pointwise(f"op{i}", 1000, f"v{i}", f"v{i + 1}") for i in range(5)]
    (fused,) = fuse(chain)
    assert fused.bytes == 2 * 4000 and fused.flops == 5000 and fused.parts == tuple(op.name for op in chain)


def test_a_result_needed_outside_is_still_written() -> None:
    ops = [pointwise("a", 1000, "x", "y"), pointwise("b", 1000, "y", "z"), pointwise("c", 1000, "z", "out")]
    reader = type(ops[0])("sum", "", "reduction", "sum", "float32", ops[0].outputs, (), 1000)
    fused = fuse([*ops, reader])
    assert [op.kind for op in fused] == ["pointwise", "reduction"]
    assert {o.value for o in fused[0].outputs} == {"y", "out"}


@pytest.mark.parametrize("model", ["resnet18", "mobilenet-v2", "bert-base"])
def test_named_models_keep_flops_and_lose_bytes(model: str) -> None:
    workload = capture(model)
    fused = fuse(workload.ops)
    assert sum(op.flops for op in fused) == workload.flops
    assert sum(op.matmul_flops for op in fused) == workload.matmul_flops
    weights = sum(op.bytes_of("weights") for op in fused)
    assert weights == workload.bytes_of("weights")
    assert sum(op.bytes_of("activations") for op in fused) < workload.bytes_of("activations")
    names = [name for op in fused for name in (op.parts or (op.name,))]
    assert sorted(names) == sorted(op.name for op in workload.ops if op.kind != "view")


def test_conv_batch_norm_and_activation_are_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    (fused,) = fuse(capture(model.eval(), torch.randn(1, 3, 8, 8)).ops)
    assert fused.kind == "conv" and len(fused.parts) == 3


def test_a_convolution_with_two_readers_keeps_its_batch_norm_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.norm(y) + y.mean()

    kinds = [op.kind for op in fuse(capture(Two().eval(), torch.randn(1, 3, 8, 8)).ops)]
    assert kinds.count("norm") == 1


def test_attention_written_by_hand_becomes_one_op() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v

    workload = capture(Attention(), tuple(torch.randn(2, 4, 64, 16) for _ in range(3)))
    (fused,) = fuse(workload.ops)
    assert fused.kind == "attention" and fused.bytes == 4 * 4 * (2 * 4 * 64 * 16)


def test_fused_mode_is_never_slower_than_eager() -> None:
    workload = capture("mobilenet-v2")
    spec = processor(dispatch={"per_op_s": 1e-5})
    assert estimate(workload, spec, mode="fused").total.time_s < estimate(workload, spec).total.time_s
