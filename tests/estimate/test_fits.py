"""Does it fit: weights and KV cache whole, each storage once, and no advice that cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline import advise, capture, estimate
from ridgeline.core.profile import Profile
from ridgeline.estimate.advice import _half_weights
from ridgeline.estimate.fits import misfit, needed_bytes
from ridgeline.estimate.processor import Settings
from ridgeline.estimate.sweep import sweep
from ridgeline.report.html import render_sweep_html
from ridgeline.report.table import render_sweep
from ridgeline.target.spec import ProcessorSpec
from ridgeline.workload.graph import Workload
from tests.estimate.support import matmul, processor, tensor, workload


def misfit_notes(profile: Profile) -> list[str]:
    return [note for note in profile.notes if note.startswith("does not fit")]


def sized(capacity: float) -> ProcessorSpec:
    return processor(memories={"dram": {"bandwidth_bps": 1e9, "capacity_bytes": capacity}})


def test_a_cache_larger_than_the_card_does_not_fit() -> None:
    profile = estimate(capture("llama-3-8b", phase="decode", context=8192, batch=64), "l4")
    cache, weights = 2 * 32 * 64 * 8 * 8192 * 128 * 2, 2 * 8_030_261_248
    assert profile.total.kv_cache_bytes == cache and profile.total.weight_bytes == pytest.approx(weights, rel=1e-6)
    assert profile.total.held_bytes == profile.total.peak_activation_bytes + profile.total.weight_bytes + cache
    assert misfit_notes(profile) == [
        f"does not fit: {profile.total.held_bytes:,} B of weights, KV cache and activations, gddr holds 24,000,000,000 B"
    ]
    assert "68.7 GB KV cache, 16.1 GB weights" in profile.table() and profile.to_json()["total"]["kv_cache_bytes"] == cache
    page = profile.to_html()
    assert "<dd>84.8 GB</dd>" in page and "KV cache 68.7 GB" in page


def decoder(batch: int, weights: int = 1000, cache: int = 100) -> Workload:
    """One product whose weights are read whole, with a cache that grows with the batch."""
    return Workload(
        "decoder", batch, "float32", (matmul(batch, 1000, 1000),), "test", stored_weights=(tensor("linear.w", weights, "weights"),),
        peak_cache_bytes=cache * batch, rebatch=lambda larger: decoder(larger, weights, cache),
    )  # fmt: skip


def advice_of(batch: int, capacity: float) -> dict[str, str]:
    return {one.change: one.detail for one in advise(estimate(decoder(batch), sized(capacity)))}


def test_what_fits_says_nothing() -> None:
    profile = estimate(capture("resnet18"), "h200")
    assert misfit_notes(profile) == [] and "KV cache" not in profile.table().split("  memory  ")[1].split("\n")[0]


def test_a_larger_batch_that_cannot_run_is_no_advice() -> None:
    assert "batch 8" in advice_of(1, 4800) and "batch 8" not in advice_of(1, 4799)
    assert "precision int8" in advice_of(1, 4799)


def test_advice_to_what_does_not_fit_says_whether_it_then_does() -> None:
    held = advice_of(2, 4100)
    assert held["precision int8"].endswith("; then it fits") and held["device h200"].endswith("; then it fits")
    assert held["weight-only int8"].endswith("; then it fits") and "batch 16" not in held
    assert advice_of(2, 1000)["weight-only int8"].endswith("; still does not fit")
    assert "fit" not in advice_of(2, 5000)["precision int8"]


def test_devices_share_weights_and_cache() -> None:
    work = replace(workload(matmul(8, 8, 8)), stored_weights=(tensor("w", 25, "weights"),), peak_cache_bytes=100, peak_activation_bytes=7)
    assert [needed_bytes(work, devices) for devices in (1, 2, 3)] == [207, 107, 74]
    assert misfit(work, sized(106), 2) == "does not fit: 107 B of weights, KV cache and activations on each device, dram holds 106 B"
    assert misfit(work, sized(107), 2) is None and misfit(replace(work, peak_cache_bytes=0), sized(100), 1) == (
        "does not fit: 107 B of weights and activations, dram holds 100 B"
    )


def test_half_of_the_weights_are_held_where_they_are_pruned() -> None:
    pruned = _half_weights(decoder(1, weights=1_000_000))
    assert pruned.weight_bytes == 4 * 1_000_000 * 34 // 64
    assert _half_weights(replace(decoder(1), stored_weights=(tensor("other", 10, "weights"),))).weight_bytes == 40


def test_a_sweep_says_where_it_stops_fitting() -> None:
    options = {"phase": "decode", "context": 1024}
    points = sweep("smollm2-135m", sized(400e6), "batch", [1, 64], Settings(), options)
    assert [point["fits"] for point in points] == [True, False]
    assert points[0]["held_bytes"] < 400e6 < points[1]["held_bytes"]
    assert render_sweep(points, "batch").count("does not fit") == 1
    assert render_sweep_html(points, "batch", "smollm2-135m", "plain").count("does not fit") == 1


def test_arrays_and_crossbars_hold_every_weight() -> None:
    work = capture("digits-cnn")
    for target in ("tpu-v1", "rram-64"):
        profile = estimate(work, target)
        assert profile.total.weight_bytes == work.with_dtype(profile.dtype).weight_bytes
