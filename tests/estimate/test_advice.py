"""Advice is a second estimate: its gain must equal what estimating the changed case by hand gives."""

from __future__ import annotations

import pytest

from ridgeline import advise, capture, estimate, load_target
from ridgeline.core.errors import OptionError
from ridgeline.estimate.processor import Settings
from ridgeline.estimate.sweep import parse_sweep, scale_bandwidth, sweep
from tests.estimate.support import matmul, processor, workload


def by_change(profile: object) -> dict[str, object]:
    return {a.change: a for a in advise(profile)}  # type: ignore[arg-type]


def test_gain_is_the_estimate_run_again() -> None:
    work = capture("llama-3-8b", phase="decode", context=192)
    before = estimate(work, "h200", graph=True)
    advice = by_change(before)
    int4 = estimate(work.with_dtype("int4", ("weights",)), "h200", graph=True)
    assert advice["weight-only int4"].predicted_speedup == pytest.approx(before.total.time_s / int4.total.time_s)  # type: ignore[attr-defined]
    assert advice["weight-only int4"].predicted_speedup > 1.5  # type: ignore[attr-defined]
    assert advice["weight-only int4"].next_limit.startswith(int4.total.bottleneck)  # type: ignore[attr-defined]
    larger = estimate(work.rebatch(8), "h200", graph=True)  # type: ignore[misc]
    assert advice["batch 8"].predicted_speedup == pytest.approx(8 * before.total.time_s / larger.total.time_s)  # type: ignore[attr-defined]


def test_fusion_precision_sparsity_and_devices_are_offered_where_they_pay() -> None:
    advice = by_change(estimate(capture("vgg16", batch=32), "h200"))
    assert {"precision bfloat16", "fusion", "2:4 sparsity"} & set(advice) >= {"precision bfloat16"}
    assert not any(name == "device h200" for name in advice)
    assert all(a.predicted_speedup >= 1.02 for a in advice.values())  # type: ignore[attr-defined]


def test_communication_advice_only_between_devices() -> None:
    spec = processor(links={"peer": {"latency_s": 1e-5, "bandwidth_bps": 1e10}})
    pair = workload(matmul(64, 1024, 1024, "up", result="h"), matmul(64, 1024, 1024, "down", source="h", result="y"))
    alone, split = by_change(estimate(pair, spec)), by_change(estimate(pair, spec, devices=4))
    assert not {"overlap communication", "compress communication"} & set(alone)
    assert {"overlap communication", "compress communication"} <= set(split)


def test_nothing_is_advised_where_nothing_helps() -> None:
    spec = processor(peak=1e9, bandwidth=1e15)
    names = set(by_change(estimate(workload(matmul(512, 512, 512)), spec)))
    assert not {n for n in names if not n.startswith("device ")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("batch=1..8", ("batch", [1, 2, 4, 8])), ("batch=3..20", ("batch", [3, 6, 12, 20])), ("context=128,512", ("context", [128, 512]))],
)
def test_sweep_values(text: str, expected: tuple[str, list[float]]) -> None:
    assert parse_sweep(text) == expected


@pytest.mark.parametrize(
    "text",
    ["batch", "batch=", "batch=0..4", "batch=4..1", "batch=1.5", "batch=a..b", "speed=1..4", "batch=1..1e30", "batch=-1", "batch=nan"],
)
def test_bad_sweeps_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_sweep(text)


def test_sweep_shows_where_the_bottleneck_changes() -> None:
    points = sweep("resnet18", load_target("h200"), "batch", [1, 8, 64, 256], Settings(), {"dtype": "bfloat16"})
    assert points[0]["bottleneck"] == "overhead" and points[-1]["bottleneck"] != "overhead"
    rates = [p["throughput_per_s"] for p in points]
    assert rates == sorted(rates)
    spec = load_target("h200")
    assert scale_bandwidth(spec, 2.0).memories["hbm"].bandwidth_bps.value == 2 * spec.memories["hbm"].bandwidth_bps.value


def test_other_devices_are_compared_at_their_limits() -> None:
    """A target with measured probes must not look slower than an unmeasured one for that reason alone."""
    workload = capture("llama-3-8b", phase="decode", context=192)
    assert not {"device h100", "device a100", "device l4"} & set(by_change(estimate(workload, "h200")))
    elsewhere = by_change(estimate(workload, "l4"))["device h200"]
    assert "plus launches and page faults" in elsewhere.detail  # type: ignore[attr-defined]
