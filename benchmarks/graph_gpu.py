"""A Llama-style block in bfloat16: eager torch, optimised by graph passes, compiled, and optimised then compiled, in turn in one run.

python benchmarks/graph_gpu.py                        two or three minutes on a GPU; writes results/graph-block-<label>.json
  --device cpu --small                                the same on small sizes, to see that it runs

by hand   norms, rotary positions, attention and gate written out, as in Hugging Face's eager Llama
modules   nn.RMSNorm, scaled_dot_product_attention and a gated perceptron, as in workload/models/decoder.py
Inputs rotate over more than the L2 cache; GPU time by events with the host ahead (kernel/bench/timing.py), and in CUDA graphs.
"compiled again" is torch.compile of a copy: how far equal things lie apart. `difference`: largest difference from the float32 block,
relative to its largest value; `of_limit`: the time of the products with weights alone, at the rate --target was measured to reach, over
the time taken.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.estimate.processor import estimate
from ridgeline.kernel.bench.timing import CudaTimer, GraphTimer, Timed, set_count, time_in_turn
from ridgeline.measure.environment import machine_name
from ridgeline.target.load import catalog_names, load_target
from ridgeline.transform.graph.optimize import optimize
from ridgeline.workload.capture import capture
from ridgeline.workload.models.decoder import DecoderConfig, Layer

Step = Callable[[int], Any]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of one sequence through one block."""

    tokens: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(1, self.hidden, self.intermediate, self.heads, self.kv_heads, 1000, 10_000.0)


SIZES = (Size(2048, 4096, 14336, 32, 8), Size(512, 2048, 5632, 32, 4))
SMALL = (Size(64, 128, 256, 4, 2),)


class ByHand(nn.Module):
    """One block with everything written out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.width = size, size.hidden // size.heads
        self.first, self.second = (nn.Parameter(torch.rand(size.hidden) + 0.5) for _ in range(2))
        self.q = nn.Linear(size.hidden, size.hidden, bias=False)
        self.k, self.v = (nn.Linear(size.hidden, size.kv_heads * self.width, bias=False) for _ in range(2))
        self.o = nn.Linear(size.hidden, size.hidden, bias=False)
        self.gate, self.up = (nn.Linear(size.hidden, size.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(size.intermediate, size.hidden, bias=False)
        self.register_buffer("mask", torch.full((size.tokens, size.tokens), float("-inf")).triu(1)[None, None])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x, self.first), cos, sin)
        y = self.norm(x, self.second)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return gain * wide.to(x.dtype)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.width)
        q, k, v = (one(x).view(heads).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = repeated(k, self.size.heads // self.size.kv_heads), repeated(v, self.size.heads // self.size.kv_heads)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.width**-0.5 + self.mask
        shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.matmul(shares, v).transpose(1, 2).contiguous()
        out: Tensor = self.o(mixed.reshape(x.shape))
        return out


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, tokens, width = x.shape
    return x if times == 1 else x[:, :, None].expand(batch, heads, times, tokens, width).reshape(batch, heads * times, tokens, width)


class OfModules(nn.Module):
    """One block of torch's own modules."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layer = Layer(size.config)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = self.layer(x, positions, cos, sin, None)
        return out


def block(kind: str, size: Size, device: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module and one input set; x is the first of it."""
    from ridgeline.workload.models.decoder import RotaryEmbedding

    torch.manual_seed(0)
    with torch.device(device):
        module: nn.Module = ByHand(size) if kind == "by hand" else OfModules(size)
        positions = torch.arange(size.tokens)
        cos, sin = RotaryEmbedding(size.config).to(device)(positions, dtype)
        x = torch.randn(1, size.tokens, size.hidden, dtype=dtype)
    module = module.to(dtype=dtype).eval().requires_grad_(False)
    if kind == "modules":
        return module, (x, positions, cos, sin)
    plain = sin[:, sin.shape[-1] // 2 :]  # ours has the minus of the rotation in its first half
    return module, (x, cos[None], torch.cat((plain, plain), dim=-1)[None])


def ways(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """The modules to time, by name; compiled ones compile at their first call."""
    optimised, change = optimize(module, inputs, measure=False, predict=False, memory="none", require_gain=False)
    for one in change.details["passes"]:
        if one["changed_sites"]:
            print(f"  {one['name']}: {one['changed_sites']} places, {one['nodes_before']} nodes to {one['nodes_after']}")
    return {
        "eager": module,
        "optimised": optimised,
        "compiled": torch.compile(module, fullgraph=True),
        "optimised, compiled": torch.compile(optimised, fullgraph=True),
        "compiled again": torch.compile(copy.deepcopy(module), fullgraph=True),
    }


def steps_of(made: dict[str, Any], inputs: tuple[Tensor, ...], sets: int) -> dict[str, Step]:
    rotating = [(torch.randn_like(inputs[0]), *inputs[1:]) for _ in range(sets)]

    def step(module: Any) -> Step:
        def call(at: int) -> Any:
            with torch.no_grad():
                return module(*rotating[at])

        return call

    return {name: step(module) for name, module in made.items()}


def errors(made: dict[str, Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Each way's distance from the float32 block."""
    wide = copy.deepcopy(module).float()
    with torch.no_grad():
        expected = wide(*(one.float() if one.is_floating_point() else one for one in inputs))
        return {name: float((one(*inputs).float() - expected).abs().max() / expected.abs().max()) for name, one in made.items()}


def measured(kind: str, size: Size, device: str, dtype: torch.dtype, repeats: int, target: str | None) -> list[Row]:
    torch._dynamo.reset()
    module, inputs = block(kind, size, device, dtype)
    print(f"{kind}, {size.tokens} tokens x {size.hidden}", flush=True)
    made = ways(module, inputs)
    off = errors(made, module, inputs)
    limit_s = None
    if target:  # of what no pass can take away
        rows_of = estimate(capture(module, inputs, name=kind), load_target(target)).rows
        limit_s = sum(row.limit_s for row in rows_of if row.name.startswith("linear"))
    sets = set_count(inputs[0].nbytes, 4 * inputs[0].nbytes, device)
    rows = []
    for in_graph in (False, True) if device.startswith("cuda") else (False,):
        found = time_in_turn(steps_of(made, inputs, sets), sets, device, repeats, GraphTimer if in_graph else CudaTimer)
        for name, timed in found.items():
            row = {
                "block": kind, "tokens": size.tokens, "hidden": size.hidden, "intermediate": size.intermediate, "heads": size.heads,
                "kv_heads": size.kv_heads, "dtype": str(dtype).removeprefix("torch."), "way": name, "in_graph": in_graph,
                "input_sets": sets, "difference": off[name], **timed.to_json(),
                "against_eager": ratio(found["eager"], timed), "against_compiled": ratio(found["compiled"], timed),
                "limit_s": limit_s, "of_limit": 1e3 * limit_s / timed.gpu_ms if limit_s and timed.gpu_ms else None,
            }  # fmt: skip
            rows.append(row)
            shown = timed.error or f"{timed.gpu_ms:8.3f} ms  {row['against_eager']:5.2f}x eager  {row['against_compiled']:5.2f}x compiled"
            of_limit = f"  {100 * row['of_limit']:.0f} % of the limit" if row["of_limit"] else ""
            print(f"  {'in a graph' if in_graph else 'launched':11}{name:22}{shown}{of_limit}  error {off[name]:.1e}", flush=True)
    return rows


def ratio(first: Timed, second: Timed) -> float | None:
    return first.gpu_ms / second.gpu_ms if first.gpu_ms and second.gpu_ms else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--kinds", default="by hand,modules")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--label", default=None, help="machine's name in the result file (default: the device's)")
    parser.add_argument("--target", default=None, help="whose limit to compare with (default: the catalog's entry for this GPU)")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    name = machine_name(options.device.partition(":")[0])
    label = options.label or ("cpu" if options.device == "cpu" else name.lower().removeprefix("nvidia ").replace(" ", "-"))
    target = options.target or next((one for one in catalog_names("processor") if one in label), None)
    rows: list[Row] = []
    for kind in options.kinds.split(","):
        for size in SMALL if options.small else SIZES:
            rows += measured(kind, size, options.device, torch.bfloat16, options.repeats, target)
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()
    machine = {"device": name}
    print(write_results("graph", "block", label, machine, rows, options.out))


if __name__ == "__main__":
    main()
