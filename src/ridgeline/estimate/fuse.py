"""Fused mode: what a compiler would run as one kernel becomes one op.

    conv | linear | matmul | attention ──> + batch norm, pointwise while each result has one consumer   epilogue
    pointwise | norm | softmax ──────────> + pointwise chain                                                   loop fusion
    q·kᵀ → (scale, mask) → softmax → ·v written by hand ──> attention

A fused op reads what its members read from outside, writes what others need of its members' results, launches once and
does the members' FLOPs. Values between members never reach memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..workload.graph import Op, Operand

LEADERS = frozenset({"conv", "linear", "matmul", "attention", "pointwise", "norm", "softmax", "pool", "copy", "embedding", "create"})
FOLLOWERS = frozenset({"pointwise"})


def fuse(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops of a fused run, in order; views are index arithmetic and vanish."""
    ops = [op for op in ops if op.kind != "view"]
    consumers = _consumers(ops)
    group_of: dict[int, int] = {}
    groups: list[list[int]] = []
    producer: dict[str, int] = {}
    for index, op in enumerate(ops):
        host = _host(op, index, ops, consumers, producer, group_of, groups)
        if host is None:
            group_of[index] = len(groups)
            groups.append([index])
        else:
            group_of[index] = host
            groups[host].append(index)
        for operand in op.outputs:
            producer[operand.value] = index
    ordered = sorted(groups, key=lambda members: members[-1])
    return tuple(_merge([ops[i] for i in members], members, consumers) for members in ordered)


def _consumers(ops: Sequence[Op]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        for operand in op.inputs:
            found.setdefault(operand.value, []).append(index)
    return found


def _host(
    op: Op,
    index: int,
    ops: Sequence[Op],
    consumers: dict[str, list[int]],
    producer: dict[str, int],
    group_of: dict[int, int],
    groups: list[list[int]],
) -> int | None:
    """The group an op joins: that of the latest producer among its inputs, if the rules allow it."""
    makers = [producer[o.value] for o in op.inputs if o.value in producer]
    if not makers:
        return None
    latest = max(makers)
    host = group_of[latest]
    members = [ops[i] for i in groups[host]]
    if op.kind == "norm" and "batch_norm" in op.operator:
        return host if members[0].kind == "conv" and _only_consumer(members[-1], index, consumers) else None
    if op.kind in ("softmax", "matmul") and _attention_step(members, op):
        return host if _only_consumer(members[-1], index, consumers) else None
    if op.kind not in FOLLOWERS or members[0].kind not in LEADERS:
        return None
    # every other input must exist before the group's leader runs on, so nothing made after it may be needed
    others = [m for m in makers if group_of[m] != host]
    return host if all(m < groups[host][-1] or m < latest for m in others) else None


def _only_consumer(maker: Op, index: int, consumers: dict[str, list[int]]) -> bool:
    return all(consumers.get(o.value, [index]) == [index] for o in maker.outputs)


def _attention_step(members: Sequence[Op], op: Op) -> bool:
    """matmul → pointwise* → softmax → pointwise* → matmul, the hand-written attention."""
    kinds = [m.kind for m in members if m.kind not in ("pointwise", "copy")]
    return (op.kind == "softmax" and kinds == ["matmul"]) or (op.kind == "matmul" and kinds == ["matmul", "softmax"])


def _merge(members: list[Op], indices: list[int], consumers: dict[str, list[int]]) -> Op:
    if len(members) == 1:
        return members[0]
    inside = set(indices)
    reads: dict[tuple[str, tuple[int, ...]], Operand] = {}
    written_before: set[str] = set()
    for op in members:
        for operand in op.inputs:
            if operand.value not in written_before:
                reads.setdefault((operand.value, operand.shape), operand)
        written_before |= {o.value for o in op.outputs}
    writes = {
        o.value: o
        for op in members
        for o in op.outputs
        if o.role != "activations" or any(c not in inside for c in consumers.get(o.value, [-1]))
    }
    last = members[-1]
    writes = writes or {o.value: o for o in last.outputs}
    leader = next((m for m in members if m.loops), members[0])
    kind = "attention" if sum(m.kind == "matmul" for m in members) == 2 and any(m.kind == "softmax" for m in members) else leader.kind
    return replace(
        leader,
        kind=kind,
        inputs=tuple(reads.values()),
        outputs=tuple(writes.values()),
        flops=sum(m.flops for m in members),
        matmul_flops=sum(m.matmul_flops for m in members),
        loops=tuple(loop for m in members for loop in m.loops),
        parts=tuple(m.name for m in members),
        operator="+".join(m.operator for m in members),
    )
