"""Peak memory of linear + cross-entropy, forward and backward, ours against eager torch, beyond inputs and gradients of neither.

python benchmarks/kernel_memory.py     seconds on a GPU with 24 GB free; writes results/kernel-memory-<machine>.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch.nn import functional

from ridgeline.kernel.linear_cross_entropy import linear_cross_entropy
from ridgeline.measure.environment import machine_name

SHAPES = ((8192, 4096, 128_256), (8192, 4096, 32_000), (16384, 768, 50_257))


def peak_bytes(loss: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> int:
    """Most memory taken at a time beyond what was there before, gradients included."""
    for tensor in inputs[:2]:
        tensor.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(*inputs).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def row(rows: int, width: int, vocabulary: int) -> dict[str, Any]:
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    target = torch.randint(vocabulary, (rows,), device="cuda")

    def eager(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight), target)

    ours, plain = (peak_bytes(loss, (hidden, weight, target)) for loss in (linear_cross_entropy, eager))
    return {"op": "linear_cross_entropy", "shape": [rows, width, vocabulary], "dtype": "bfloat16", "ours_bytes": ours, "eager_bytes": plain,
            "share": ours / plain}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    rows = [row(*shape) for shape in SHAPES]
    for found in rows:
        ours, eager = (found[name] / 2**30 for name in ("ours_bytes", "eager_bytes"))
        print(f"{found['shape']}: ours {ours:.2f} GiB, eager {eager:.2f} GiB, {found['share']:.2f}")
    name = machine_name("cuda")
    print(write_results("kernel", "memory", name.lower().removeprefix("nvidia "), {"device": name}, rows, options.out))


if __name__ == "__main__":
    main()
