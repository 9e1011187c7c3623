"""Advice is the estimate run again with one change made: the gain it predicts, and the limit that binds next.

    Profile ──each change──> estimate(changed workload, changed target or settings) ──> Advice(change, speed-up, next limit)
      speed-up is per sample, so that a larger batch can be compared with the rest

A change that gains less than 2 %, or that the memory does not hold, is left out; where the run itself does not fit, what does
not make it larger stays, and says whether it then fits. Quality is not predicted: a change that alters numbers says so in its detail.
Changes that a graph pass makes (fold_norm, epilogue, attention) have the pass's name; `ridgeline optimize --passes NAME` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..core.checks import expect
from ..core.dtypes import BITS, FLOATING
from ..core.errors import RidgelineError
from ..core.profile import Advice, Profile
from ..target.array import SpatialArraySpec
from ..target.crossbar import CrossbarSpec
from ..target.load import catalog_names, load_processor
from ..target.spec import ProcessorSpec
from ..workload.graph import Op, Operand, Workload
from .fits import misfit
from .fuse import fuse
from .processor import Settings, estimate

LEAST_GAIN = 1.02
NARROWER = ("tfloat32", "bfloat16", "float16", "float8", "int8")
Change = tuple[str, str, Callable[[], Profile]]
DEVICE = "device "
MOST_DEVICES = 3
ELSEWHERE = "the same run on another machine; on both each op at its limit, plus launches and page faults, because nobody timed ops there"


def advise(profile: Profile) -> list[Advice]:
    """What would help, best first, other machines last; empty where nothing would."""
    expect("profile", profile, Profile, do="estimate first: advise(estimate(workload, target))")
    workload, spec, settings = profile.workload, profile.spec, profile.settings
    if workload is None or spec is None or not profile.rows:
        return []
    if isinstance(spec, SpatialArraySpec):
        return _on_array(workload, spec)
    if isinstance(spec, CrossbarSpec):
        return []  # every change to a chip file changes the answers too, which this estimate cannot weigh
    found = []
    own_s = profile.total.time_s / max(profile.batch, 1)
    ideal_s = estimate(workload, without_probes(spec), settings=settings).total.time_s / max(profile.batch, 1)
    for change, detail, run in _changes(workload, spec, settings):
        # another device's ops are taken at their limits, because nobody timed ops on it; so this one is too
        before_s = ideal_s if change.startswith(DEVICE) else own_s
        try:
            after = run()
        except RidgelineError:
            continue  # a change this model or target does not allow is no advice
        if (room := _room(profile, after)) is None:
            continue
        after_s = after.total.time_s / max(after.batch, 1)
        if after_s > 0 and before_s / after_s >= LEAST_GAIN:
            found.append(Advice(change, before_s / after_s, _limit(after), detail + room, before_s, after_s))
    ranked = sorted(found, key=lambda a: -a.predicted_speedup)
    devices = [a for a in ranked if a.change.startswith(DEVICE)]
    return [a for a in ranked if a not in devices] + devices[:MOST_DEVICES]


def _room(before: Profile, after: Profile) -> str | None:
    """What to add to advice where the run does not fit; None where the change is what makes it so, or worsens it."""
    tight, late = (misfit(one.workload, one.spec, one.settings.devices) for one in (before, after))
    if late is None:
        return "; then it fits" if tight else ""
    return "; still does not fit" if tight and after.total.held_bytes <= before.total.held_bytes else None


def _on_array(workload: Workload, spec: SpatialArraySpec) -> list[Advice]:
    """Layers mapped again on the changed array; mappings that were already searched are not searched again."""
    from .spatial.network import map_layers
    from .spatial.whatif import advise_on_array

    found = advise_on_array(map_layers(workload, spec))
    return [replace(one, detail=f"{one.energy_text}; {one.detail}; {one.basis}") for one in found]


def _limit(profile: Profile) -> str:
    """The limit that binds after a change, with the cause of its heaviest op."""
    heaviest = max(profile.rows, key=lambda row: row.time_s)
    return f"{profile.total.bottleneck} ({heaviest.cause})"


def _changes(workload: Workload, spec: ProcessorSpec, settings: Settings) -> Iterator[Change]:
    def again(work: Workload, target: ProcessorSpec = spec, how: Settings = settings) -> Callable[[], Profile]:
        return lambda: estimate(work, target, settings=how)

    yield from _precision(workload, spec, again)
    if settings.mode == "eager":
        yield (
            "fusion",
            "pointwise chains, conv + batch norm + activation and attention as one kernel each (torch.compile; "
            "without a compiler the graph passes fold_norm, epilogue, attention, norm, rope and gated do what they can)",
            again(workload, how=replace(settings, mode="fused")),
        )
        yield from _passes(workload, again)
    if spec.dispatch and spec.dispatch.in_graph_s and not settings.graph:
        yield "graph capture", "launch the whole pass as one CUDA graph", again(workload, how=replace(settings, graph=True))
    if workload.rebatch is not None:
        larger = workload.batch * 8
        yield (
            f"batch {larger}",
            "more samples share the weights read; time per sample, latency of one pass rises",
            _rebatched(workload, larger, again),
        )
    yield from _weights(workload, spec, settings, again)
    if spec.fault_s_per_byte and not settings.keep_memory:
        detail = "set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ to 1073741824, or preload jemalloc: no page is faulted in twice"
        yield "keep memory", detail, again(workload, how=replace(settings, keep_memory=True))
    if any(op.kind == "conv" for op in workload.ops) and not settings.channels_last and any(p.family == "conv_nhwc" for p in spec.probes):
        yield (
            "channels-last",
            "store images as NHWC: model.to(memory_format=torch.channels_last), or the graph pass layout, which does it where it pays",
            again(workload, how=replace(settings, channels_last=True)),
        )
    if any(unit.tiles for unit in spec.units.values()):
        yield "smaller tiles", "tiles down to 16 x 16, so that fewer are padded or left idle", again(workload, _finer_tiles(spec))
    if settings.devices > 1 or settings.host_copy:
        yield "overlap communication", "send while the next op computes", again(workload, how=replace(settings, communication_overlap=1.0))
    if settings.devices > 1:
        yield (
            "compress communication",
            "messages in 8 bits; rounds what is sent",
            again(workload, how=replace(settings, compression=_compression(workload))),
        )
    for name in catalog_names("processor"):
        if name != spec.name:
            yield f"{DEVICE}{name}", ELSEWHERE, _elsewhere(name, again, workload)


def _passes(workload: Workload, again: Callable[..., Callable[[], Profile]]) -> Iterator[Change]:
    """What a graph pass would make of the workload, under the pass's name."""
    folded = _with_groups(workload, lambda one: one.kind == "conv" and "batch_norm" in one.operator, alone=True)
    if folded is not workload:
        yield "fold_norm", "batch norms folded into the weights before them: `ridgeline optimize --passes fold_norm`", again(folded)
    ended = _with_groups(workload, lambda one: one.kind in ("conv", "linear"))
    if ended is not workload:
        detail = "conv or linear + norm, activation and residual as one operator: `ridgeline optimize --passes fold_norm,epilogue`"
        yield "epilogue", detail, again(ended)
    attended = _with_groups(workload, lambda one: one.kind == "attention")
    if attended is not workload:
        yield "attention", "attention written out by hand as one operator: `ridgeline optimize --passes attention`", again(attended)


def _with_groups(workload: Workload, chosen: Callable[[Op], bool], alone: bool = False) -> Workload:
    """The workload with those fused groups that are `chosen` as one op each; `alone`: only the convolution and its norm of each."""
    by_name = {op.name: op for op in workload.ops}
    ends: dict[str, Op] = {}
    gone: set[str] = set()
    for one in fuse(workload.ops):
        if len(one.parts) < 2 or not chosen(one):
            continue
        parts = [by_name[name] for name in one.parts]
        if alone:
            parts = parts[:2]
            if "batch_norm" not in parts[-1].operator:
                continue
            # the product's own cost, its result written where the norm wrote: the norm is gone
            one = replace(parts[0], outputs=parts[1].outputs)
        ends[parts[-1].name] = one
        gone |= {part.name for part in parts}
    if not ends:
        return workload
    return replace(workload, ops=tuple(ends.get(op.name, op) for op in workload.ops if op.name in ends or op.name not in gone))


def _elsewhere(name: str, again: Callable[..., Callable[[], Profile]], workload: Workload) -> Callable[[], Profile]:
    return lambda: again(workload, without_probes(load_processor(name)))()


def without_probes(spec: ProcessorSpec) -> ProcessorSpec:
    """The target taken at its limits, whatever was measured on it."""
    return spec.model_copy(update={"probes": ()})


def _rebatched(workload: Workload, batch: int, again: Callable[..., Callable[[], Profile]]) -> Callable[[], Profile]:
    def run() -> Profile:
        if workload.rebatch is None:
            raise AssertionError("only offered where the workload can be captured again")
        larger: Profile = again(workload.rebatch(batch))()
        return larger

    return run


def _precision(workload: Workload, spec: ProcessorSpec, again: Callable[..., Callable[[], Profile]]) -> Iterator[Change]:
    if workload.dtype not in FLOATING:
        return
    for dtype in NARROWER:
        narrower = BITS[dtype] < BITS[workload.dtype] or (dtype == "tfloat32" and workload.dtype == "float32")
        if narrower and spec.peak("linear", dtype)[1] == dtype:
            yield f"precision {dtype}", f"weights and activations in {dtype}: check the accuracy", again(workload.with_dtype(dtype))


def _weights(workload: Workload, spec: ProcessorSpec, settings: Settings, again: Callable[..., Callable[[], Profile]]) -> Iterator[Change]:
    for dtype in ("int8", "int4"):
        if BITS[dtype] < BITS[workload.dtype]:
            detail = f"weights stored in {dtype} and widened on the way in; arithmetic stays {workload.dtype}: check the accuracy"
            yield f"weight-only {dtype}", detail, again(workload.with_dtype(dtype, ("weights",)))
    if any(unit.sparse_speedup > 1 for unit in spec.units.values()) and not settings.sparse:
        yield (
            "2:4 sparsity",
            "half of the weights zero in every group of four: check the accuracy",
            again(_half_weights(workload), how=replace(settings, sparse=True)),
        )


def _half_weights(workload: Workload) -> Workload:
    """Matrix weights at half their elements plus two index bits for each that is kept."""

    def thinner(o: Operand) -> Operand:
        bits = BITS[o.dtype]
        return replace(o, elements=int(o.elements * (bits + 2) / (2 * bits))) if o.role == "weights" else o

    def thin(op: Op) -> Op:
        return replace(op, inputs=tuple(map(thinner, op.inputs))) if op.loops else op

    thinned = {o.value for op in workload.ops if op.loops for o in op.inputs if o.role == "weights"}
    stored = tuple(thinner(o) if o.value in thinned else o for o in workload.stored_weights)
    return replace(workload, ops=tuple(map(thin, workload.ops)), stored_weights=stored)


def _finer_tiles(spec: ProcessorSpec) -> ProcessorSpec:
    units = {
        name: unit.model_copy(update={"tiles": (*unit.tiles, (32, 32), (16, 16))}) if unit.tiles else unit
        for name, unit in spec.units.items()
    }
    return spec.model_copy(update={"units": units})


def _compression(workload: Workload) -> float:
    return max(BITS[workload.dtype] / 8, 1.0)
