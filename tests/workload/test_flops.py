"""Captured FLOPs against torch's own counter, for every named model, and the figures worked by hand in the docs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.workload.capture import capture_case, resolve
from ridgeline.workload.case import CaseOptions, ModelCase
from ridgeline.workload.exported import export_case
from ridgeline.workload.models import MODELS, model_names
from tests.support import FULL

QUICK = (
    "resnet18",
    "resnet50",
    "alexnet",
    "vgg16",
    "mobilenet-v2",
    "vit-b16",
    "bert-base",
    "gpt2",
    "tinyllama-1.1b",
    "qwen2.5-0.5b",
    "llama-3-8b",
)
ONE_PHASE = () if FULL else ("qwen2.5-0.5b", "llama-3-8b")  # decoders differ in their sizes alone
CASES = [
    (name, phase)
    for name in (model_names() if FULL else QUICK)
    for phase in (MODELS[name].phases or (None,))[-1 if name in ONE_PHASE else 0 :]
]
ATTENTION = ("attention", "_scaled_dot_product", "scaled_dot_product")


def torch_flops(case: ModelCase) -> tuple[int, int]:
    """(matmul and conv, attention) FLOPs torch counts on the exported module."""
    module = export_case(case).module()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*case.args, **case.kwargs)
    attention = others = 0
    for operator, flops in counter.get_flop_counts()["Global"].items():
        if any(word in str(operator) for word in ATTENTION):
            attention += flops
        else:
            others += flops
    return others, attention


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_named_model_flops_equal_torch(name: str, phase: str | None) -> None:
    context = 192 if phase else None
    case = resolve(name, CaseOptions(phase=phase, context=context))
    workload = capture_case(case)
    others, attention = torch_flops(case)
    ours = {kind: sum(op.matmul_flops for op in workload.ops if op.kind == kind) for kind in ("attention", "conv", "linear", "matmul")}
    # On the meta device torch runs attention as two bmm; elsewhere as one operator, which it counts or not.
    assert sum(ours.values()) == workload.matmul_flops
    assert others + attention in (workload.matmul_flops, workload.matmul_flops - ours["attention"])
    assert ours["attention"] > 0 or MODELS[name].family == "cnn"
    assert all(u.zero_flop for u in workload.uncounted), workload.uncounted
    assert workload.parameters == MODELS[name].parameters


def test_attention_is_counted_on_cpu_where_torch_counts_none() -> None:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (10, 12, 12))

    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    workload = capture_case(ModelCase("attend", Attend(), (q, k, v), 2, "float32"))
    assert workload.matmul_flops == 2 * 2 * 4 * 10 * 12 * (16 + 16)


@pytest.mark.parametrize(
    ("dtype", "size", "intensity"), [("float16", 1_925_504, 122.58), ("int8", 962_752, 245.2), ("float32", 3_851_008, 61.3)]
)
def test_resnet50_first_convolution(dtype: str, size: int, intensity: float) -> None:
    from ridgeline import capture

    first = capture("resnet50", dtype=dtype).ops[0]
    assert (first.layer, first.kind, first.flops, first.bytes) == ("conv1", "conv", 236_027_904, size)
    assert first.intensity == pytest.approx(intensity, rel=5e-4)
    loop = first.loops[0]
    assert dict(loop.dims) == {"B": 1, "G": 1, "K": 64, "C": 3, "P": 112, "Q": 112, "R": 7, "S": 7}
    assert (loop.stride, loop.padding, loop.dilation) == ((2, 2), (3, 3), (1, 1))


def test_llama_decode_reads_15_gb_of_weights() -> None:
    from ridgeline import capture

    workload = capture("llama-3-8b", phase="decode", context=192)
    assert workload.bytes_of("weights") / 1e9 == pytest.approx(15.01, abs=0.005)
    assert workload.bytes_of("weights") / 4.8e12 == pytest.approx(3.13e-3, abs=0.005e-3)
    # keys and values of 192 positions are read, those of the new one written
    heads_bytes = 32 * 2 * 8 * 128 * 2
    assert workload.bytes_of("kv_cache") == heads_bytes * 192 + heads_bytes
