"""Two ranks under torchrun equal one at the same batch; what each rank takes and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from ridgeline.core.errors import TrainError
from ridgeline.train import parallel
from ridgeline.train.parallel import GradientSum, World, join_world, synchronised_norms
from tests.support import ROOT
from tests.train import two_ranks


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    two_ranks.main(tmp_path / "one")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(two_ranks.__file__))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, script, str(tmp_path / "two")], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    alone = load_file(tmp_path / "one" / "rank-0.safetensors")
    ranks = [load_file(tmp_path / "two" / f"rank-{rank}.safetensors") for rank in range(2)]
    for name, value in alone.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), f"{name}: the ranks went apart"
        if not name.startswith("normed"):
            torch.testing.assert_close(ranks[0][name], value, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    losses = [json.loads((tmp_path / where).read_text()) for where in ("one/rank-0.json", "two/rank-0.json", "two/rank-1.json")]
    for name in (*two_ranks.CASES, "ignored"):
        assert losses[0][name] == pytest.approx(losses[1][name], rel=1e-10) and losses[1][name] == losses[2][name]
    assert all("resumed from step 8" in found["again"][0] for found in losses)
    assert all(torch.equal(rank[name], rank[name.replace("again", "plain")]) for rank in ranks for name in rank if name.startswith("again"))
    assert losses[0]["notes"] == [] and "each rank's own rows" in losses[1]["notes"][0]
    assert done.stderr.count("100%") == len(two_ranks.CASES), "only rank 0 shows progress"


@given(batch=st.integers(1, 1000), size=st.integers(1, 64))
def test_ranks_share_out_every_row(batch: int, size: int) -> None:
    rows = [World(rank, size).rows(batch) for rank in range(size)]
    assert sum(rows) == batch and max(rows) - min(rows) <= 1


def test_alone_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_world("cpu") == World() and World().leads and not World(1, 2).leads


def test_half_an_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainError, match="without RANK, MASTER_ADDR, MASTER_PORT"):
        join_world("cpu")


@given(sizes=st.lists(st.integers(1, 40), max_size=12))
def test_buckets_keep_order_and_size(sizes: list[int]) -> None:
    tensors = [torch.zeros(size, dtype=torch.float64 if size % 5 == 0 else torch.float32) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "BUCKET_BYTES", 128)
        buckets = list(parallel._buckets(tensors))
    assert [tensor for bucket in buckets for tensor in bucket] == tensors or not tensors
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket}) == 1 and (len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket) <= 128)


def test_a_parameter_used_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    summed = GradientSum(list(layer.parameters()), World(0, 2))
    summed.used = [True, False]
    layer.weight.grad, layer.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    with pytest.raises(TrainError, match="had none in the first step"):
        summed(torch.zeros(1))


def test_norms_are_synchronised_on_cuda_for_the_run_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    names = list(model.state_dict())
    with synchronised_norms(model, World(0, 2), torch.device("cuda")) as notes:
        inner = model[1][0]
        assert notes == [] and isinstance(inner, nn.SyncBatchNorm) and list(model.state_dict()) == names
        assert inner.running_mean is not None
        inner.running_mean.add_(1.0)
    back = model[1][0]
    assert type(back) is nn.BatchNorm2d and back.running_mean is not None and bool((back.running_mean == 1).all())
