"""The tiling model against a brute-force count of a tiled loop, and stack distances against their definition."""

from __future__ import annotations

from math import ceil, inf

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.spec import parse_spec
from ridgeline.estimate.traffic import level_traffic, reuse_distances
from ridgeline.target.spec import ProcessorSpec
from tests.estimate.support import matmul, pointwise, processor, tensor


def two_levels(inner_bytes: float, tile: tuple[int, int] | None = None) -> ProcessorSpec:
    memories = {"inner": {"bandwidth_bps": 1e12, "capacity_bytes": inner_bytes}, "outer": {"bandwidth_bps": 1e11, "capacity_bytes": 1e12}}
    spec = processor(memories=memories)
    if tile is None:
        return spec
    units = {"tensor": {"peak_flops": {"float32": 1e12}, "tiles": [list(tile)]}}
    return parse_spec(ProcessorSpec, spec.model_dump(exclude_none=True) | {"units": units}, "tiled.toml")


def brute_force_reads(m: int, n: int, k: int, tile: tuple[int, int]) -> int:
    """Walk the tiles of C; each loads its whole panel of A and of B; C is written once."""
    words = 0
    for i in range(0, m, tile[0]):
        for j in range(0, n, tile[1]):
            words += (min(i + tile[0], m) - i) * k + (min(j + tile[1], n) - j) * k
            words += (min(i + tile[0], m) - i) * (min(j + tile[1], n) - j)
    return words


@given(m=st.integers(1, 60), n=st.integers(1, 60), k=st.integers(1, 30), rows=st.integers(1, 40), columns=st.integers(1, 40))
def test_register_traffic_equals_walking_the_tiles(m: int, n: int, k: int, rows: int, columns: int) -> None:
    traffic = level_traffic(matmul(m, n, k), two_levels(1e12, (rows, columns)))
    assert traffic.bytes["inner"] == 4 * brute_force_reads(m, n, k, (rows, columns))


@given(m=st.integers(1, 2000), n=st.integers(1, 2000), k=st.integers(1, 2000), size=st.floats(64, 1e8))
def test_traffic_is_compulsory_at_least_and_shrinks_with_capacity(m: int, n: int, k: int, size: float) -> None:
    op = matmul(m, n, k)
    small, large = (level_traffic(op, two_levels(s)).bytes["outer"] for s in (size, 4 * size))
    assert op.bytes <= small and op.bytes <= large
    # doubling the tile's side can cost one more padded row of tiles, never more
    assert large <= small * (1 + 2 / max(ceil(min(m, n) / (size / 4) ** 0.5), 1)) + op.bytes
    if min(m * k, n * k) * 4 <= size:
        assert small == op.bytes


def test_a_memory_split_into_private_copies_holds_smaller_tiles() -> None:
    op = matmul(2048, 2048, 2048)
    shared = two_levels(1e6)
    private = parse_spec(
        ProcessorSpec,
        shared.model_dump(exclude_none=True)
        | {
            "memories": {
                "inner": {"bandwidth_bps": 1e12, "capacity_bytes": 1e6, "copies": 64},
                "outer": {"bandwidth_bps": 1e11, "capacity_bytes": 1e12},
            }
        },
        "private.toml",
    )
    assert level_traffic(op, private).bytes["outer"] > level_traffic(op, shared).bytes["outer"]


def naive_distance(trace: list[tuple[str, int]], index: int) -> float:
    """Distinct other bytes touched since the last touch of this value, searching backwards."""
    value, seen = trace[index][0], {}
    for earlier, size in reversed(trace[:index]):
        if earlier == value:
            return float(sum(seen.values()))
        seen[earlier] = size
    return inf


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_stack_distances_follow_their_definition(pairs: list[tuple[int, int]]) -> None:
    ops = []
    for number, (a, b) in enumerate(pairs):
        reads = tuple(tensor(f"w{i}", 10 * (i + 1), "weights") for i in {a, b})
        op = pointwise(f"op{number}", 1, "unused", "unused")
        ops.append(type(op)(op.name, "", "pointwise", "add", "float32", reads, (), 1))
    found = reuse_distances(ops)
    trace = [[(o.value, o.bytes) for o in op.inputs] for op in ops]
    flat = [item for _ in range(2) for touched in trace for item in touched]
    position = sum(len(touched) for touched in trace)
    for op_distances, touched in zip(found, trace, strict=True):
        for offset, distance in enumerate(op_distances):
            before = [*flat[:position], touched[offset]]  # operands of one op are touched together
            assert distance == naive_distance(before, len(before) - 1)
        position += len(touched)
