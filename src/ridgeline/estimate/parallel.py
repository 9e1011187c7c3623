"""Communication: host transfers, all-reduces, and a workload split over several devices.

    shard(ops, n): layers alternate as in Megatron-LM
      column layer  full input  → weights/n, FLOPs/n, output/n        stays split
      row layer     split input → weights/n, FLOPs/n, full output     all-reduce of the output
      all other ops follow their inputs; where split meets full, the split side is gathered first
    all_reduce_s = 2(n−1) · latency + 2(n−1)/n · bytes / bandwidth    (ring)      host_copy_s = latency + bytes / bandwidth

Ref: Shoeybi 2019 (alternation), Patarasuk and Yuan 2009 (ring). Not modelled: uneven splits, contention between links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..target.spec import Link
from ..workload.graph import LoopNest, Op, Operand


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes an op must send before its result can be used."""

    kind: str  # all-reduce or all-gather
    bytes: int


def all_reduce_s(size: int, devices: int, link: Link) -> float:
    """Ring all-reduce of `size` bytes."""
    if devices < 2:
        return 0.0
    return 2 * (devices - 1) * link.latency_s.value + 2 * (devices - 1) / devices * size / link.bandwidth_bps.value


def all_gather_s(size: int, devices: int, link: Link) -> float:
    """Ring all-gather that leaves `size` bytes on every device."""
    if devices < 2:
        return 0.0
    return (devices - 1) * link.latency_s.value + (devices - 1) / devices * size / link.bandwidth_bps.value


def host_copy_s(size: int, link: Link) -> float:
    """One copy between host and device."""
    return link.latency_s.value + size / link.bandwidth_bps.value


def message_s(message: Message, devices: int, link: Link, compression: float = 1.0) -> float:
    size = int(message.bytes / compression)
    return all_reduce_s(size, devices, link) if message.kind == "all-reduce" else all_gather_s(size, devices, link)


def shard(ops: Sequence[Op], devices: int) -> tuple[tuple[Op, ...], dict[str, Message]]:
    """One device's share of the work, and what each op must communicate."""
    split: set[str] = set()
    shares: list[Op] = []
    messages: dict[str, Message] = {}
    for op in ops:
        share, message, keeps_split = _share(op, split, devices)
        shares.append(share)
        if message:
            messages[op.name] = message
        outputs = {o.value for o in op.outputs}
        split = split | outputs if keeps_split else split - outputs
    last = next((op for op in reversed(ops) if op.outputs), None)  # views after it write nothing
    if last and any(o.value in split for o in last.outputs):
        messages[last.name] = Message("all-gather", sum(o.bytes for o in last.outputs))
    return tuple(shares), messages


def _share(op: Op, split: set[str], devices: int) -> tuple[Op, Message | None, bool]:
    inputs_split = [o for o in op.inputs if o.value in split]
    weighted = op.kind in ("linear", "conv") and any(o.role == "weights" for o in op.inputs)
    if weighted and not inputs_split:
        return _divide(op, devices, split, {"N", "K"} if op.kind == "linear" else {"K"}, outputs=True), None, True
    if weighted:
        row = _divide(op, devices, split, {"K"} if op.kind == "linear" else {"C"}, outputs=False)
        return row, Message("all-reduce", sum(o.bytes for o in op.outputs)), False
    if not inputs_split:
        return op, None, False
    largest = max(o.elements for o in op.inputs)
    full = [o for o in op.inputs if o.value not in split and o.role == "activations" and o.elements == largest]
    over_features = op.kind == "softmax" or (op.kind == "norm" and "batch" not in op.operator)
    if full or over_features:
        return op, Message("all-gather", sum(o.bytes for o in inputs_split)), False
    return _divide(op, devices, split, {"B"}, outputs=True), None, True


def _divide(op: Op, devices: int, split: set[str], dims: set[str], outputs: bool) -> Op:
    """An op with `dims` of its loops, its weights and its split operands divided by the number of devices."""

    def part(o: Operand, divided: bool) -> Operand:
        return replace(o, elements=-(-o.elements // devices)) if divided else o

    weighted = op.kind in ("linear", "conv")
    dim = ("N" if outputs else "K") if op.kind == "linear" else next(iter(dims))
    return replace(
        op,
        inputs=tuple(part(o, o.value in split or o.role == "kv_cache" or (weighted and o.role == "weights")) for o in op.inputs),
        outputs=tuple(part(o, outputs) for o in op.outputs),
        flops=-(-op.flops // devices),
        matmul_flops=-(-op.matmul_flops // devices),
        loops=tuple(_divide_loop(loop, dim, devices) for loop in op.loops),
    )


def _divide_loop(loop: LoopNest, dim: str, devices: int) -> LoopNest:
    dims = dict(loop.dims)
    dims[dim] = max(-(-dims[dim] // devices), 1)
    return replace(loop, dims=dims)
