"""Profiles to draw: a ResNet-50-like pass, a language model's decode step with 1,000+ rows, and degenerate ones.

layer list ──Machine.row──> OpRow (roofline times, launch cost, measured = expected x deterministic noise) ──profile_of──> Profile
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ridgeline.core.profile import Advice, OpRow, Profile, Roofs, Share, Timing, Total


@dataclass(frozen=True)
class Machine:
    """Peaks in FLOP/s by unit and dtype, bandwidths in B/s by level (nearest first), launch cost in seconds."""

    name: str
    compute: Mapping[str, float]
    memory: Mapping[str, float]
    matrix: str
    vector: str
    launch_s: float
    efficiency: float = 0.62

    def row(self, name: str, kind: str, flops: int, weights: int, activations: int, shape: Sequence[int], **given: Any) -> OpRow:
        size = weights + activations
        peak = self.compute[self.matrix if kind in MATRIX else self.vector]
        reuse = [4.0, 1.6, 1.0][-len(self.memory) :]
        moved = {level: size * factor for level, factor in zip(self.memory, reuse, strict=False)}
        memory_s = {level: moved[level] / bandwidth for level, bandwidth in self.memory.items()}
        compute_s = flops / peak
        limit_s = max([compute_s, *memory_s.values()]) if kind != "view" else 0.0
        busy = limit_s / self.efficiency
        overhead_s = self.launch_s if kind != "view" else 0.0
        bottleneck, cause = self._limiter(compute_s, memory_s, busy, overhead_s)
        return OpRow(
            name=name.replace(".", "_"), layer=name, kind=kind, operator=f"aten.{kind}.default", dtype="float16",
            input_shapes=(tuple(shape),), output_shapes=(tuple(shape),), flops=flops, matmul_flops=flops if kind in MATRIX else 0,
            bytes=size, bytes_by={"weights": weights, "activations": activations, "kv_cache": 0}, intensity=flops / size if size else 0.0,
            time_s=busy + overhead_s, limit_s=limit_s, efficiency=self.efficiency, compute_s=compute_s, memory_s=memory_s,
            level_intensity={level: flops / count if count else 0.0 for level, count in moved.items()}, overhead_s=overhead_s,
            roof_flops=flops / limit_s if limit_s else 0.0, bottleneck=bottleneck, cause=cause,
            energy_j=flops * 1e-12 + size * 6e-11, **given,
        )  # fmt: skip

    def _limiter(self, compute_s: float, memory_s: Mapping[str, float], busy: float, overhead_s: float) -> tuple[str, str]:
        slowest = max(memory_s, key=lambda level: memory_s[level], default="none")
        if overhead_s > busy:
            return "overhead", "launch: the kernel runs for less time than it takes to start"
        if abs(compute_s - memory_s.get(slowest, 0.0)) < 0.1 * busy:
            return "compute+memory", f"balanced between the unit and {slowest}"
        if compute_s > memory_s.get(slowest, 0.0):
            return "compute", "wave quantisation: 3.2 waves of tiles run as 4"
        return "memory", f"low reuse: each byte from {slowest} is used once"


MATRIX = ("conv", "linear", "matmul", "attention")
NPU = Machine(
    "npu-256", {"matrix float16": 128e12, "matrix int8": 256e12, "matrix float32": 64e12, "vector float32": 32e12, "vector float16": 32e12},
    {"L1": 8192e9, "L2": 4096e9, "HBM": 1024e9}, "matrix float16", "vector float16", 4e-6,
)  # fmt: skip
GPU = Machine(
    "h200", {"matrix float16": 989e12, "matrix bfloat16": 989e12, "matrix float8": 1979e12, "matrix int8": 1979e12,
             "matrix tfloat32": 494e12, "matrix float64": 67e12, "vector float32": 67e12,
             "vector float16": 134e12, "vector float64": 34e12},
    {"L2": 12e12, "HBM3e": 4.8e12}, "matrix bfloat16", "vector float32", 2.2e-6,
)  # fmt: skip


def resnet_rows(machine: Machine, batch: int = 1) -> list[OpRow]:
    """53 convolutions with norm and activation, pooling, a view and the classifier."""
    rows: list[OpRow] = []

    def conv(layer: str, inputs: int, outputs: int, kernel: int, size: int, stride: int = 1) -> None:
        out = size // stride
        positions = batch * out * out
        weights, moved = 2 * inputs * outputs * kernel**2, 2 * batch * inputs * size**2 + 2 * positions * outputs
        shape = (batch, outputs, out, out)
        rows.append(machine.row(layer, "conv", 2 * positions * outputs * inputs * kernel**2, weights, moved, shape))
        norm = layer.replace("conv", "bn")
        rows.append(machine.row(norm, "norm", 2 * positions * outputs, 8 * outputs, 4 * positions * outputs, shape))
        rows.append(machine.row(f"{norm}.relu", "pointwise", positions * outputs, 0, 4 * positions * outputs, shape))

    conv("conv1", 3, 64, 7, 224, 2)
    rows.append(machine.row("maxpool", "pool", batch * 64 * 56 * 56 * 9, 0, batch * 64 * (112**2 + 56**2) * 2, (batch, 64, 56, 56)))
    inputs, size = 64, 56
    for stage, (blocks, planes) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            base = f"layer{stage}.{block}"
            conv(f"{base}.conv1", inputs, planes, 1, size)
            conv(f"{base}.conv2", planes, planes, 3, size, stride)
            conv(f"{base}.conv3", planes, planes * 4, 1, size // stride)
            if block == 0:
                conv(f"{base}.downsample.conv", inputs, planes * 4, 1, size, stride)
            inputs, size = planes * 4, size // stride
            moved = 6 * batch * inputs * size**2
            rows.append(machine.row(f"{base}.add", "pointwise", batch * inputs * size**2, 0, moved, (batch, inputs, size, size)))
    rows.append(machine.row("avgpool", "pool", batch * 2048 * 49, 0, batch * 2048 * 50 * 2, (batch, 2048, 1, 1)))
    rows.append(machine.row("flatten", "view", 0, 0, 0, (batch, 2048)))
    rows.append(machine.row("fc", "linear", 2 * batch * 2048 * 1000, 2 * 2048 * 1000, batch * 3048 * 2, (batch, 1000)))
    return rows


def decoder_rows(machine: Machine, layers: int = 64, width: int = 4096, batch: int = 1) -> list[OpRow]:
    """A decode step: per block two norms, four projections, attention, three MLP products, rotary, adds, views."""
    rows = [machine.row("model.embed_tokens", "embedding", 0, 2 * width, 2 * width, (batch, 1, width))]

    def linear(layer: str, inputs: int, outputs: int) -> None:
        rows.append(
            machine.row(
                layer, "linear", 2 * batch * inputs * outputs, 2 * inputs * outputs, 2 * batch * (inputs + outputs), (batch, 1, outputs)
            )
        )

    for index in range(layers):
        base = f"model.layers.{index}"
        shape = (batch, 1, width)
        pointwise = [("input_layernorm", "norm", 4), ("self_attn.rotary", "pointwise", 6), ("residual", "pointwise", 1)]
        for name, kind, each in pointwise:
            rows.append(machine.row(f"{base}.{name}", kind, each * batch * width, 2 * width, 4 * batch * width, shape))
        for name, outputs in (("q_proj", width), ("k_proj", width // 4), ("v_proj", width // 4), ("o_proj", width)):
            linear(f"{base}.self_attn.{name}", width, outputs)
            rows.append(machine.row(f"{base}.self_attn.{name}.view", "view", 0, 0, 0, (batch, 32, 1, 128)))
        rows.append(machine.row(f"{base}.self_attn", "attention", 4 * batch * width * 192, 0, 2 * batch * width * 50, shape))
        rows.append(machine.row(f"{base}.post_attention_layernorm", "norm", 4 * batch * width, 2 * width, 4 * batch * width, shape))
        for name, inputs, outputs in (("gate_proj", width, 14336), ("up_proj", width, 14336), ("down_proj", 14336, width)):
            linear(f"{base}.mlp.{name}", inputs, outputs)
        rows.append(machine.row(f"{base}.mlp.act_fn", "pointwise", 5 * batch * 14336, 0, 4 * batch * 14336, (batch, 1, 14336)))
        rows.append(machine.row(f"{base}.mlp.residual", "pointwise", batch * width, 0, 6 * batch * width, shape))
    linear("lm_head", width, 128256)
    return rows


def timing(seconds: float) -> Timing:
    return Timing(seconds, seconds * 0.97, seconds * 1.06, 30)


def profile_of(rows: Sequence[OpRow], machine: Machine, *, measured: bool = False, **given: Any) -> Profile:
    """Place the rows on a timeline, sum them up, and measure them if asked (seeded noise around the prediction)."""
    noise = random.Random(7)
    placed, clock = [], 0.0
    for row in rows:
        reality = timing(row.time_s * math.exp(noise.gauss(0.05, 0.22))) if measured and row.time_s else None
        placed.append(replace(row, start_s=clock, measured=reality))
        clock += row.time_s
    by_bottleneck: dict[str, float] = defaultdict(float)
    by_kind: dict[str, float] = defaultdict(float)
    for row in placed:
        by_kind[row.kind] += row.time_s
        if row.time_s:
            by_bottleneck[row.bottleneck] += row.time_s
    weights, activations = (sum(row.bytes_by[role] for row in rows) for role in ("weights", "activations"))
    total = Total(
        flops=sum(row.flops for row in rows), matmul_flops=sum(row.matmul_flops for row in rows), bytes=weights + activations,
        bytes_by={"weights": weights, "activations": activations, "kv_cache": 0}, time_s=clock, limit_s=sum(row.limit_s for row in rows),
        bottleneck=max(by_bottleneck, key=lambda name: by_bottleneck[name], default=""), peak_activation_bytes=4_816_896,
        weight_bytes=weights, parameters=weights // 2, by_bottleneck=by_bottleneck, energy_j=sum(row.energy_j or 0.0 for row in rows),
        measured=timing(sum(row.measured.median_s for row in placed if row.measured)) if measured else None,
        measured_peak_bytes=weights + 9_000_000 if measured else None,
    )  # fmt: skip
    shares = tuple(
        Share(kind, time_s, time_s / clock, 1 / (1 - time_s / clock) if time_s < clock else math.inf)
        for kind, time_s in sorted(by_kind.items(), key=lambda item: -item[1])
        if clock
    )
    settings: dict[str, Any] = {"model": "resnet50", "target": machine.name, "batch": 1, "dtype": "float16", "mode": "eager", **given}
    return Profile(rows=tuple(placed), total=total, roofs=Roofs(machine.compute, machine.memory), shares=shares, **settings)


ADVICE = (
    Advice("fuse conv, norm and activation", 1.82, "compute", "107 launches and 212 MB of activations saved", 1.71e-3, 0.94e-3),
    Advice("batch 1 to 32", 2.64, "memory", "fills the matrix unit: 92 % of tiles busy, was 31 %", 1.71e-3, 0.648e-3),
    Advice("int8 weights and activations", 1.21, "overhead", "halves the bytes of every convolution", 1.71e-3, 1.41e-3),
    Advice("channels-last layout", 1.04, "overhead", "", 1.71e-3, 1.644e-3),
)
UNCOUNTED = ({"name": "roi_align_1", "operator": "torchvision.roi_align", "layer": "head.roi", "zero_flop": False, "why": "no formula"},)


@pytest.fixture(scope="session")
def estimate_profile() -> Profile:
    notes = ("efficiency from probes on this machine", "layout conversions are not modelled")
    return profile_of(resnet_rows(NPU), NPU, advice=ADVICE, uncounted=UNCOUNTED, notes=notes)


@pytest.fixture(scope="session")
def measured_profile() -> Profile:
    return profile_of(resnet_rows(NPU, batch=8), NPU, measured=True, advice=ADVICE, batch=8)


@pytest.fixture(scope="session")
def large_profile() -> Profile:
    given = {"model": "llama-3-8b", "dtype": "bfloat16", "phase": "decode", "context": 192}
    return profile_of(decoder_rows(GPU, layers=88), GPU, measured=True, advice=ADVICE, **given)


@pytest.fixture(scope="session")
def comparison() -> list[Profile]:
    slow = Machine("cpu", {"vector float32": 0.6e12}, {"L1": 800e9, "L2": 400e9, "DRAM": 20e9}, "vector float32", "vector float32", 8e-6)
    return [profile_of(resnet_rows(machine), machine, advice=ADVICE, measured=machine is slow) for machine in (slow, NPU, GPU)]


@pytest.fixture(scope="session")
def empty_profile() -> Profile:
    total = Total(0, 0, 0, {}, 0.0, 0.0, "", 0, 0, 0, {})
    return Profile("nothing", "nowhere", 1, "float32", "eager", (), total, Roofs({}, {}))


@pytest.fixture(scope="session")
def odd_profile() -> Profile:
    """Zero, infinite and missing values wherever a number may stand."""
    plain = NPU.row("a", "conv", 100, 10, 10, (1, 2))
    rows = (
        replace(plain, time_s=math.inf, limit_s=math.inf, intensity=math.inf, level_intensity={}, bottleneck="", cause=""),
        replace(plain, time_s=0.0, limit_s=0.0, bytes=0, intensity=0.0, memory_s={}, level_intensity={"HBM": math.inf}),
        replace(plain, time_s=math.nan, start_s=math.nan, roof_flops=math.inf, measured=Timing(0.0, 0.0, 0.0, 1)),
        replace(plain, layer="", name="bare", output_shapes=(), flops=10**18, measured=Timing(1e-3, 1e-3, 1e-3, 1)),
        replace(plain, kind="view", flops=0, bytes=0, time_s=0.0),
    )
    total = Total(400, 0, 0, {}, math.inf, 0.0, "quantum", 0, 0, 0, {"quantum": math.inf}, energy_j=math.nan, measured=timing(0.0))
    advice = (Advice("nothing", math.inf, "", "", 0.0, 0.0), Advice("worse", 0.5, "memory"))
    share = (Share("conv", math.inf, 1.0, math.inf),)
    return Profile("odd", "chip", 0, "int4", "fused", rows, total, Roofs({"u": 0.0, "v": math.inf}, {"m": 0.0}), share, advice=advice)


@pytest.fixture(scope="session")
def hostile_profile(estimate_profile: Profile) -> Profile:
    """Strings that mean something to a browser, to rich and to a terminal."""
    row = replace(
        estimate_profile.rows[0], name="</script><script>alert(1)</script>", layer='[red]"onload="x()[/red]', cause="\x1b[31m<b>&amp;"
    )
    model = "<script>alert('x')</script>[bold]"
    advice = (replace(ADVICE[0], change="<img src=x onerror=alert(1)>", detail="{{ 7*7 }} ]]> -->"),)
    return replace(estimate_profile, model=model, rows=(row, *estimate_profile.rows[1:]), advice=advice, notes=("<!-- [/]",))


@pytest.fixture(scope="session")
def sweep_points() -> list[dict[str, Any]]:
    """Batch 1 to 256 on the accelerator: launch, then memory, then compute binds."""
    points = []
    for power in range(9):
        batch = 2**power
        profile = profile_of(resnet_rows(GPU, batch), GPU)
        share = profile.total.limit_s / profile.total.time_s
        points.append({"value": batch, "time_s": profile.total.time_s, "throughput_per_s": batch / profile.total.time_s,
                       "bottleneck": profile.total.bottleneck, "roof_fraction": share})  # fmt: skip
    return points


@pytest.fixture(scope="session")
def counted() -> Callable[[Profile], int]:
    """How many elements the roofline must hold."""
    return lambda profile: sum(row.flops > 0 for row in profile.rows)
