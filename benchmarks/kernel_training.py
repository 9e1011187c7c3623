"""Training with our kernels against plain torch: a Llama-style model of 12 layers, 768 wide, on the bytes of a text, in bfloat16
with float32 masters of the weights and gradients clipped to a norm of 1.

python benchmarks/kernel_training.py --text tinyshakespeare.txt   two minutes on a GPU; writes results/kernel-training-<machine>.json

eager and compiled, each with and without use_kernels(model), from the same weights on the same batches: the loss at every tenth
step, read in float32, and the median time of a step, the two taking turns so that the machine's clocks are the same for both.
Batches of 64 keep the GPU busy; of 16 (--batch 16), eager torch is about as long on the host as on the GPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import nn

from ridgeline.kernel.use import use_kernels
from ridgeline.measure.environment import machine_name
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig

LAYERS, WIDTH = 12, 768
PAIRS = (("eager", "eager with kernels"), ("compiled", "compiled with kernels"))


class Batches:
    """Random windows of a text, the same for every variant."""

    def __init__(self, text: Path, batch: int, tokens: int, device: str) -> None:
        self.data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).to(device=device, dtype=torch.long)
        self.batch, self.tokens = batch, tokens

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.data) - self.tokens - 1, (self.batch,), generator=torch.Generator().manual_seed(step))
        windows = torch.stack([self.data[s : s + self.tokens + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


class Trainer:
    """One variant: its own copy of the weights and the optimiser."""

    def __init__(self, name: str, model: nn.Module, positions: torch.Tensor) -> None:
        self.name, self.model, self.positions = name, copy.deepcopy(model), positions
        self.kernels = use_kernels(self.model) if name.endswith("kernels") else None
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]  # bfloat16 alone would round most of an update away
        self.optimiser = torch.optim.AdamW(self.masters, lr=1e-4, fused=positions.is_cuda)
        self.run: Any = torch.compile(self.model, fullgraph=True) if name.startswith("compiled") else self.model
        self.losses: list[float] = []
        self.step_ms: list[float] = []

    def step(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.run(ids, self.positions)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        loss.backward()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        return loss.detach()


def train(trainers: list[Trainer], batches: Batches, steps: int) -> None:
    """Every variant does ten steps, then the next: the loss is read at the tenth."""
    for first in range(0, steps, 10):
        data = [batches.at(step) for step in range(first, first + 10)]
        for trainer in trainers:
            _synchronise()
            start = time.perf_counter()
            for ids, target in data:
                loss = trainer.step(ids, target)
            _synchronise()
            trainer.step_ms.append((time.perf_counter() - start) * 100)
            trainer.losses.append(float(loss))
        print(f"step {first + 10:4}  " + "  ".join(f"{t.name} {t.losses[-1]:.4f} {t.step_ms[-1]:.2f} ms" for t in trainers), flush=True)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", type=Path, default=Path(os.environ.get("RIDGELINE_DATA", ".").split(":")[0]) / "text" / "tinyshakespeare.txt"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compiled-steps", type=int, default=60, help="0: eager alone")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = DecoderConfig(LAYERS, WIDTH, 2048, 12, 12, 256, 1e4)
    model = CausalLM(config).to(options.device, torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    positions = torch.arange(options.tokens, device=options.device)
    batches = Batches(options.text, options.batch, options.tokens, options.device)
    rows = []
    for pair, steps in zip(PAIRS, (options.steps, options.compiled_steps), strict=True):
        if steps == 0:
            continue
        trainers = [Trainer(name, model, positions) for name in pair]
        train(trainers, batches, steps)
        rows += compared(trainers, options.batch, options.tokens)
    label = machine_name(options.device).lower().removeprefix("nvidia ") if options.device == "cuda" else "cpu"
    print(write_results("kernel", "training", label, {"device": machine_name(options.device)}, rows, options.out))


def compared(trainers: list[Trainer], batch: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of a pair, each against the first."""
    rows, other = [], trainers[0]
    for trainer in trainers:
        pairs = list(zip(trainer.losses, other.losses, strict=True))
        rows.append({
            "variant": trainer.name, "layers": LAYERS, "width": WIDTH, "batch": batch, "tokens": tokens,
            "losses": trainer.losses, "step_ms": statistics.median(trainer.step_ms[2:] or trainer.step_ms),
            "speedup": statistics.median(b / a for a, b in list(zip(trainer.step_ms, other.step_ms, strict=True))[2:] or [(1.0, 1.0)]),
            "largest_loss_difference": max(abs(a / b - 1) for a, b in pairs),
            "replaced": trainer.kernels.report() if trainer.kernels else {},
        })  # fmt: skip
        print(f"{trainer.name:24} {rows[-1]['step_ms']:8.2f} ms a step  {rows[-1]['speedup']:.3f}x  loss within "
              f"{rows[-1]['largest_loss_difference']:.2%}  {rows[-1]['replaced']}")  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
