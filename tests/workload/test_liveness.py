"""What is held: every weight storage whole and once, the KV cache that is passed in, and copies made of it while they live."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ridgeline import capture
from ridgeline.workload.models import MODELS


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "llama-3.2-1b", "resnet18", "smollm2-135m"])
def test_weights_are_parameters_times_their_dtype(name: str) -> None:
    work = capture(name)
    size = 2 if work.dtype == "bfloat16" else 4
    assert work.weight_bytes == pytest.approx(MODELS[name].parameters * size, rel=1e-3)  # buffers besides; tied embeddings once


def test_weights_follow_their_dtype_and_integers_stay() -> None:
    work = capture("resnet18")
    counters = 20 * 8  # num_batches_tracked
    assert work.with_dtype("int8").weight_bytes == (work.weight_bytes - counters) // 4 + counters
    assert work.with_dtype("int8", ("activations",)).weight_bytes == work.weight_bytes


def test_the_cache_passed_in_is_held_whole() -> None:
    work = capture("gpt2", phase="decode", context=512, batch=8)
    assert work.peak_cache_bytes == 2 * 12 * 8 * 512 * 768 * 4
    assert work.with_dtype("float16").peak_cache_bytes == work.peak_cache_bytes // 2
    assert work.with_dtype("int8", ("weights",)).peak_cache_bytes == work.peak_cache_bytes
    assert capture("gpt2").peak_cache_bytes == 0


class Copies(nn.Module):
    """Two lengthened caches: one read and dropped, one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(5))
        self.table = nn.Embedding(100, 4)
        self.tied = nn.Linear(4, 100, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        dropped = torch.cat([cache, x], 1).sum()
        return self.tied(self.table(torch.zeros(1, dtype=torch.long))) + dropped, torch.cat([cache, x, x], 1)


class Branches(Copies):
    """The same for the recorded run: torch.export cannot follow a branch on data."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * 2 if float(x.sum()) > 1 else x, cache)


@pytest.mark.parametrize(("module", "how"), [(Copies(), "torch.export"), (Branches(), "dispatch")])
def test_copies_count_while_they_live_tied_weights_once_and_unused_ones_too(module: nn.Module, how: str) -> None:
    work = capture(module, {"x": torch.zeros(1, 1, 3), "cache": torch.zeros(1, 10, 3)})
    assert work.captured_by == how
    assert work.weight_bytes == 4 * (5 + 400)
    assert work.peak_cache_bytes == 4 * 3 * (10 + 12)
