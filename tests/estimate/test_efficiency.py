"""Efficiency learned from probes: exact at a probe, between its neighbours elsewhere, 1 where nothing was measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.estimate.efficiency import family_of, probe_op
from ridgeline.estimate.processor import efficiency_model, estimate
from ridgeline.target.spec import Probe
from tests.estimate.support import matmul, pointwise, processor, workload


def linear_probe(m: int, n: int, k: int, efficiency: float) -> dict[str, Any]:
    limit = max(2 * m * n * k / 2e12, 4 * (m * k + n * k + m * n) / 1e12)
    return {"family": "matmul", "dtype": "float32", "flops": 2 * m * n * k, "read_bytes": [4 * m * k, 4 * n * k], "write_bytes": 4 * m * n,
            "matmul": [1, m, n, k], "seconds": limit / efficiency}  # fmt: skip


def test_a_probed_op_takes_the_time_the_probe_took() -> None:
    probe = linear_probe(256, 512, 1024, 0.4)
    row = estimate(workload(matmul(256, 512, 1024)), processor(probes=[probe])).rows[0]
    assert row.efficiency == pytest.approx(0.4) and row.time_s == pytest.approx(probe["seconds"])
    assert row.limit_s == pytest.approx(0.4 * probe["seconds"])


@given(low=st.floats(0.05, 1), high=st.floats(0.05, 1), k=st.integers(64, 8192))
def test_prediction_lies_between_its_neighbours(low: float, high: float, k: int) -> None:
    spec = processor(probes=[linear_probe(256, 256, 64, low), linear_probe(256, 256, 8192, high)])
    predicted = efficiency_model(spec).predict(matmul(256, 256, k))
    assert min(low, high) * 0.999 <= predicted <= max(low, high) * 1.001


def test_a_family_without_probes_is_taken_at_its_limit() -> None:
    spec = processor(probes=[linear_probe(64, 64, 64, 0.5)])
    row = estimate(workload(pointwise("relu", 1000, "x", "y")), spec).rows[0]
    assert row.efficiency == 1.0 and row.time_s == row.limit_s


def test_no_probe_makes_an_op_beat_its_limit() -> None:
    spec = processor(probes=[linear_probe(64, 64, 64, 3.0)])
    row = estimate(workload(matmul(64, 64, 64)), spec).rows[0]
    assert row.efficiency == 1.0


@pytest.mark.parametrize(
    "family", ["conv", "conv_depthwise", "matmul", "attention", "pointwise", "pointwise_heavy", "batch_norm", "layer_norm", "softmax"]
)
def test_a_probe_speaks_for_its_own_family(family: str) -> None:
    groups = 8 if family == "conv_depthwise" else 1
    dims = (groups, 16, 1 if groups > 1 else 8, 9) if family.startswith("conv") else (2, 16, 8, 4)
    loops = dims if family.startswith("conv") or family in ("matmul", "attention") else None
    probe = Probe(
        family=family,
        dtype="float32",
        flops=100,
        read_bytes=(400, 400),
        write_bytes=400,
        matmul=loops,
        taps=9 if loops else 1,
        seconds=1e-6,
    )
    assert family_of(probe_op(probe)) == family
