"""What a network costs on a crossbar chip: its events counted layer by layer, each at the price the chip's file states.

    Workload ──op──> G x (M x K @ K x N) ──tiles_of, events_of──> Events ──price──> joules, seconds ──> Profile
      arrays       = G * ceil(K / rows) * ceil(N / columns) * slices of w * copies       copies: 2 for differential pairs, else 1
      array reads  = M * slices of x * arrays                                            every array, one slice of an input at a time
      DAC          = M * slices of x * G * K * ceil(N / columns) * slices of w * copies  rows that hold weights
      ADC          = M * slices of x * G * N * ceil(K / rows) * slices of w              columns that hold weights, a pair converted once
                     + array reads where sign = "offset": the column of one value that every array then has
      shift-adds   = ADC conversions
      time         = M * slices of x * max(read, conversions one ADC does) + the shorter of the two once + the last shift-add

Weights stay in their arrays: there are as many as the network needs, a layer's work in parallel, layers follow one another. An array
filled in part is read as a whole; rows and columns that only pad are neither driven nor converted, arrays that only pad do not exist.
A group of a convolution has arrays of its own. Not run: products of two activations, whose cells would be written for each input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..core.dtypes import BITS
from ..core.errors import OptionError
from ..core.profile import OpRow, Profile, Roofs, Total, shares_of
from ..target.crossbar import CrossbarSpec
from ..workload.graph import ROLES, LoopNest, Op, Workload, row_fields
from .cause import bottleneck

ACTIVATIONS = ("relu", "relu6", "hardtanh", "leaky_relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "clamp")
MODE = "crossbar"


@dataclass(frozen=True, slots=True)
class Product:
    """`groups` matrix products (vectors x depth) @ (depth x columns), whose second operands stay on the chip."""

    groups: int
    vectors: int
    depth: int
    columns: int


@dataclass(frozen=True, slots=True)
class Events:
    """How often each thing happens; arrays are not an event but what is occupied."""

    arrays: int = 0
    array_reads: int = 0
    dac_conversions: int = 0
    adc_conversions: int = 0
    shift_adds: int = 0
    buffer_bits: int = 0

    def __add__(self, other: Events) -> Events:
        return Events(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Events)))

    def repeated(self, calls: int) -> Events:
        """The same arrays, used `calls` times."""
        return Events(self.arrays, *(calls * getattr(self, f.name) for f in fields(Events)[1:]))


@dataclass(frozen=True, slots=True)
class LayerOnCrossbar:
    """One op on the chip: its events and their price, all calls; leakage is counted by who knows how many arrays there are."""

    op: Op
    events: Events
    seconds: float
    read_s: float
    """Of the time, had the converters been instant."""
    convert_s: float
    """Of the time, had the arrays settled at once."""
    energy_j: float
    cause: str


def copies_of(chip: CrossbarSpec) -> int:
    """Arrays that hold one slice of one tile of weights."""
    return 2 if chip.operands.sign == "differential" else 1


def products_of(op: Op) -> tuple[Product, ...]:
    """The products of an op whose second operands are weights; none where there is not room for them among the op's weights."""
    found = tuple(_product(nest) for nest in op.loops)
    stored = sum(o.elements for o in op.inputs if o.role == "weights")
    return found if sum(p.groups * p.depth * p.columns for p in found) <= stored else ()


def _product(nest: LoopNest) -> Product:
    groups, vectors, columns, depth = nest.as_matmul()
    if nest.kind == "matmul" and "b" in nest.shared:
        return Product(1, groups * vectors, depth, columns)
    return Product(groups, vectors, depth, columns)


def events_of(product: Product, chip: CrossbarSpec) -> Events:
    """Closed forms; the tests walk tiles and slices one by one and count."""
    x_slices, w_slices, copies = len(chip.operands.x_slices), len(chip.operands.w_slices), copies_of(chip)
    row_tiles, column_tiles = -(-product.depth // chip.array.rows), -(-product.columns // chip.array.columns)
    arrays = product.groups * row_tiles * column_tiles * w_slices * copies
    reads = product.vectors * x_slices * arrays
    steps = product.groups * product.vectors * x_slices * w_slices
    conversions = steps * product.columns * row_tiles + (reads if chip.operands.sign == "offset" else 0)
    moved_bits = product.groups * product.vectors * (product.depth + product.columns) * chip.x_bits  # results leave as wide as inputs come
    return Events(arrays, reads, steps * product.depth * column_tiles * copies, conversions, conversions, moved_bits)


def _step(product: Product, chip: CrossbarSpec) -> tuple[float, float, int]:
    """Seconds of one read of a layer's arrays, of the conversions that follow, and how many each ADC does."""
    cost = chip.cost
    converted = min(product.columns, chip.array.columns) + (chip.operands.sign == "offset")
    each = -(-converted // cost.adcs_per_array)
    return cost.dac_conversion_s.value + cost.array_read_s.value, each * cost.adc_conversion_s.value, each


def energy_j(events: Events, chip: CrossbarSpec) -> float:
    """Of the events, without leakage."""
    cost = chip.cost
    return (
        events.array_reads * cost.array_read_j.value
        + events.dac_conversions * cost.dac_conversion_j.value
        + events.adc_conversions * cost.adc_conversion_j.value
        + events.shift_adds * cost.shift_add_j.value
        + events.buffer_bits * cost.buffer_bit_j.value
    )


def area_mm2(arrays: int, chip: CrossbarSpec) -> float:
    """Of so many arrays with their drivers, and of converters, adders and buffers, which the two arrays of a pair share."""
    cost = chip.cost
    driven = cost.array_mm2.value + chip.array.rows * cost.dac_mm2.value
    shared = cost.adcs_per_array * cost.adc_mm2.value + cost.shift_add_mm2.value + cost.buffer_mm2.value
    return arrays * driven + arrays / copies_of(chip) * shared


def layer_on_crossbar(op: Op, chip: CrossbarSpec) -> LayerOnCrossbar | None:
    """The op's events and price; None for an op the arrays do not run."""
    products = products_of(op)
    if not products:
        return None
    events, seconds, read_s, convert_s, slowest, cause = Events(), 0.0, 0.0, 0.0, -1.0, ""
    for product in products:
        read, convert, each = _step(product, chip)
        steps = product.vectors * len(chip.operands.x_slices)
        taken = steps * max(read, convert) + min(read, convert) + chip.cost.shift_add_s.value
        events += events_of(product, chip)
        seconds, read_s, convert_s = seconds + taken, read_s + steps * read, convert_s + steps * convert
        if taken > slowest:
            slowest = taken
            cause = f"{steps:,} reads of {read * 1e9:.3g} ns, {each} conversions an ADC of {convert * 1e9:.3g} ns together"
    whole = events.repeated(op.calls)
    return LayerOnCrossbar(op, whole, seconds * op.calls, read_s * op.calls, convert_s * op.calls, energy_j(whole, chip), cause)


def estimate_on_crossbar(workload: Workload, chip: CrossbarSpec) -> Profile:
    """`estimate` for a crossbar: one row an op, in the order of the network."""
    step_s = max(_step(Product(1, 1, chip.array.rows, chip.array.columns), chip)[:2])
    if not step_s:
        raise OptionError(
            f"{chip.name} states no time",
            why="cost.array_read_s and cost.adc_conversion_s are 0, so everything would take none",
            do=f"use a chip that states its cost, e.g. rram-64, or copy it: `ridgeline targets show {chip.name}`",
        )
    layers = {op.name: layer for op in workload.ops if (layer := layer_on_crossbar(op, chip))}
    arrays = _arrays(list(layers.values()))
    leak_w = arrays * chip.cost.static_w.value
    dtype = f"int{chip.x_bits}"
    work = workload.with_dtype(dtype) if dtype in BITS else workload
    rows: list[OpRow] = []
    elsewhere: dict[str, int] = {}
    leaving: set[str] = set()  # values that come straight out of the arrays
    for op in work.ops:
        if op.kind == "view":
            continue
        start = rows[-1].start_s + rows[-1].time_s if rows else 0.0
        if op.name in layers:
            rows.append(_layer_row(op, layers[op.name], leak_w, start))
        elif not _on_the_way_out(op, leaving):
            rows.append(_host_row(op, chip, leak_w, start))
            elsewhere[op.kind] = elsewhere.get(op.kind, 0) + 1
            leaving -= {out.value for out in op.outputs}  # in place: no longer what the arrays gave
            continue
        leaving |= {out.value for out in op.outputs}
    events = sum((layer.events for layer in layers.values()), Events())
    held = arrays * chip.array.rows * chip.array.columns / (len(chip.operands.w_slices) * copies_of(chip))
    peak = {f"crossbar {dtype}": 2 * held / (len(chip.operands.x_slices) * step_s)} if held else {}
    return Profile(
        work.model, chip.name, work.batch, dtype, MODE, tuple(rows), _total(work, rows), Roofs(peak, {}), shares_of(rows),
        notes=_notes(workload, chip, arrays, events, elsewhere), phase=work.phase, context=work.context, workload=work, spec=chip,
    )  # fmt: skip


def _arrays(layers: Sequence[LayerOnCrossbar]) -> int:
    """Arrays of all layers; ops that use the same weights share theirs."""
    held: dict[str, int] = {}
    for layer in layers:
        weights = max((o for o in layer.op.inputs if o.role == "weights"), key=lambda o: o.elements)
        held[weights.value] = max(held.get(weights.value, 0), layer.events.arrays)
    return sum(held.values())


def _on_the_way_out(op: Op, leaving: set[str]) -> bool:
    """Whether the op is done on results as they are shifted and added: batch norm or an activation straight after a layer."""
    done = "batch_norm" in op.operator or op.operator.strip("_") in ACTIVATIONS
    return done and bool(op.inputs) and op.inputs[0].value in leaving


def _layer_row(op: Op, layer: LayerOnCrossbar, leak_w: float, start: float) -> OpRow:
    seconds = layer.seconds
    return OpRow(
        **row_fields(op), start_s=start, time_s=seconds, limit_s=seconds, compute_s=seconds, roof_flops=op.flops / seconds,
        bottleneck="adc" if layer.convert_s > layer.read_s else "array", cause=layer.cause, energy_j=layer.energy_j + leak_w * seconds,
    )  # fmt: skip


def _host_row(op: Op, chip: CrossbarSpec, leak_w: float, start: float) -> OpRow:
    host = chip.host
    moved = sum(o.elements for o in op.operands) * chip.x_bits / 8  # the arrays' results, whatever the model's dtype
    seconds = max(op.flops / host.ops_per_s.value, moved / host.bytes_per_s.value) * op.calls
    energy = (op.flops * host.pj_per_op.value + moved * host.pj_per_byte.value) * op.calls * 1e-12
    why = (
        "both operands are activations: cells would be written for each input" if op.loops else f"{op.kind} multiplies by no stored weights"
    )
    return OpRow(
        **row_fields(op), start_s=start, time_s=seconds, limit_s=seconds, bottleneck="host", cause=why, energy_j=energy + leak_w * seconds
    )


def _notes(workload: Workload, chip: CrossbarSpec, arrays: int, events: Events, elsewhere: dict[str, int]) -> tuple[str, ...]:
    size = f"{chip.array.rows} x {chip.array.columns}"
    notes = [
        *workload.notes,
        f"inputs of {chip.x_bits} and weights of {chip.w_bits} bits, whatever the model's dtype; accuracy is not estimated here",
        f"{arrays:,} arrays of {size}"
        + (f", {area_mm2(arrays, chip):,.3g} mm2" if area_mm2(1, chip) else "")
        + "; each weight is stored once",
        f"{events.array_reads:,} array reads, {events.dac_conversions:,} DAC and {events.adc_conversions:,} ADC conversions, "
        f"{events.shift_adds:,} shift-adds",
    ]
    if elsewhere:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(elsewhere.items(), key=lambda item: -item[1]))
        notes.append(f"not run by the arrays, taken at the cost of the file's host: {kinds}")
    return tuple(notes)


def _total(workload: Workload, rows: Sequence[OpRow]) -> Total:
    spent: dict[str, float] = {}
    for row in rows:
        spent[row.bottleneck] = spent.get(row.bottleneck, 0.0) + row.time_s
    by_role: dict[str, int] = {role: sum(row.bytes_by[role] for row in rows) for role in ROLES}
    time_s = sum(row.time_s for row in rows)
    return Total(
        sum(r.flops for r in rows), sum(r.matmul_flops for r in rows), sum(r.bytes for r in rows), by_role, time_s, time_s,
        bottleneck(spent), workload.peak_activation_bytes, workload.weight_bytes, workload.parameters, spent,
        energy_j=sum(row.energy_j or 0.0 for row in rows), kv_cache_bytes=workload.peak_cache_bytes,
    )  # fmt: skip
