"""Peak memory of a pass: which activations, and which copies of the KV cache, are alive while each op runs.

    storage: born at the first op that touches it (inputs at op 0), dies after the last op that reads it
      (what nothing reads after its last write is a result, and lives to the end)
    peak = max over ops of the bytes alive                                                   [B]

Weights and KV cache are not activations; a cache that is passed in is held throughout. Not counted: a kernel's own workspace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .graph import Op, Role


def peak_activation_bytes(ops: Sequence[Op], storage_bytes: Mapping[str, int], inputs: Sequence[str] = ()) -> int:
    """The largest sum of live activation storages over the pass."""
    return _peak(ops, storage_bytes, inputs, "activations")


def peak_cache_bytes(ops: Sequence[Op], storage_bytes: Mapping[str, int], caches: Collection[str]) -> int:
    """The `caches` passed in, each once, and the largest sum of live storages that the pass makes from them."""
    made = {value: size for value, size in storage_bytes.items() if value not in caches}
    return sum(storage_bytes[value] for value in set(caches)) + _peak(ops, made, (), "kv_cache")


def _peak(ops: Sequence[Op], storage_bytes: Mapping[str, int], inputs: Sequence[str], role: Role) -> int:
    born: dict[str, int] = dict.fromkeys(inputs, 0)
    last_read: dict[str, int] = {}
    last_write: dict[str, int] = {}
    for index, op in enumerate(ops):
        for operand in op.operands:
            if operand.role == role:
                born.setdefault(operand.value, index)
        last_read |= {o.value: index for o in op.inputs}
        last_write |= {o.value: index for o in op.outputs}
    change = [0] * (len(ops) + 1)
    for value, start in born.items():
        read, written = last_read.get(value, -1), last_write.get(value, -1)
        end = read if read > written else len(ops) - 1
        if read < 0 and written < 0:
            end = start
        size = storage_bytes.get(value, 0)
        change[start] += size
        change[min(end + 1, len(ops))] -= size
    alive = peak = 0
    for delta in change[:-1]:
        alive += delta
        peak = max(peak, alive)
    return peak
