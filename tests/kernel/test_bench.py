"""The benchmark's parts on the CPU: which rows, what they mean, who raised, what is remembered, where ours win."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.core.errors import MeasureError, UnknownNameError
from ridgeline.kernel import jit, tuning
from ridgeline.kernel.bench import Ceilings, Settings, load_cases, planned, run, wins_table
from ridgeline.kernel.bench import timing as timing_module
from ridgeline.kernel.bench import tune as tune_module
from ridgeline.kernel.bench.history import append, entry, history_file, read_history, regression
from ridgeline.kernel.bench.launches import KernelUse, kernels_used, occupancy
from ridgeline.kernel.bench.rows import BenchRow, Wanted, judge, parse_dtype
from ridgeline.kernel.bench.run import _sampling, check_device, measure_row
from ridgeline.kernel.bench.subjects import Subjects, errors
from ridgeline.kernel.bench.timing import CudaTimer, GraphTimer, RestedTimer, SteadyTimer, Timed, balanced_orders, set_count, time_in_turn
from ridgeline.kernel.bench.tune import looked_up, tune_step
from ridgeline.kernel.case import Anchor, Case
from tests.support import ROOT

CEILINGS = Ceilings(4e12, 4.4e12, {"bfloat16": 8e14, "float32": 5e13})
CPU = Settings("cpu", repeats=2)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RIDGELINE_COMMIT", "0" * 40)


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    return (torch.randn(shape, device=device, dtype=dtype, requires_grad=True),)


def case(**changes: Any) -> Case:
    given: dict[str, Any] = {
        "op": "double",
        "ours": lambda x: 2 * x,
        "plain": lambda x: x + x,
        "make": make,
        "moved": lambda inputs, backward: (4 if backward else 2) * inputs[0].nbytes,
        "anchors": (Anchor((8, 8), torch.float32, limit_ms=1e3), Anchor((8, 8), torch.float32, backward=True)),
        "sizes": {"small": ((4, 4), (8, 8)), "large": ((16, 16),)},
        "dtypes": (torch.float32, torch.bfloat16),
        "differentiable": True,
    }
    return Case(**{**given, **changes})


def wanted(backward: bool = False, **changes: Any) -> Wanted:
    return Wanted(case(**changes), (4, 4), torch.float32, backward, "small")


def timed(gpu_ms: float, host_us: float = 5.0) -> Timed:
    return Timed(gpu_ms, gpu_ms, gpu_ms, host_us)


def row(ours_ms: float = 1.0, **changes: Any) -> BenchRow:
    given: dict[str, Any] = {"ours": timed(ours_ms), "eager": timed(2.0), "bytes": 10**9, "ceiling": "copy", "ceiling_ms": 0.5}
    return BenchRow(**{**{"op": "double", "shape": (4, 4), "dtype": "float32", "backward": False, "size": "small", "device": "cuda"},
                       **given, **changes})  # fmt: skip


def test_every_kernel_file_is_loaded() -> None:
    cases = load_cases()
    assert {"softmax", "matmul", "sum_all", "layer_norm", "add"} <= set(cases) and list(cases) == sorted(cases)


def test_rows_are_planned_once_and_anchors_first() -> None:
    rows = planned([case()], ["anchors", "small"], backward=True)
    assert [r.size for r in rows[:2]] == ["anchors", "anchors"] and rows[0].anchor is not None
    assert len(rows) == 2 * 2 * 2 and len({r.key for r in rows}) == len(rows)  # 8x8 float32 is the anchors', not measured again
    assert all(not r.backward for r in planned([case()], ["large"])) and planned([case()], ["batch"]) == []
    assert {r.dtype for r in planned([case()], ["anchors", "large"], torch.bfloat16)} == {torch.bfloat16}
    with pytest.raises(UnknownNameError, match="large"):
        planned([case()], ["lrge"])
    with pytest.raises(UnknownNameError, match="bfloat16"):
        parse_dtype("bflot16")


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "share"),
    [
        (32, 0, 4, 1.0),  # 1,024 registers a warp: all 64 fit
        (33, 0, 4, 0.75),  # 1,280 a warp: 12 in each of the four partitions
        (255, 0, 8, 0.125),  # 8,192 a warp: 8 warps, one block
        (168, 100 * 1024, 4, 0.125),  # two blocks of 101 KiB
        (32, 227 * 1024, 8, 0.125),
        (32, 228 * 1024, 8, 0.0),  # with the system's 1 KiB it does not fit
        (16, 0, 1, 0.5),  # 32 blocks
        (255, 0, 16, 0.0),  # 16 warps of 8,192 do not fit
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, share: float) -> None:
    assert occupancy(registers, shared, warps) == share


def test_recorded_launches_are_summarised_and_the_recorder_is_off_outside() -> None:
    metadata = SimpleNamespace(shared=1024, num_warps=4)
    compiled = SimpleNamespace(name="k", hash="a", n_regs=32, n_spills=0, metadata=metadata)

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: compiled

    jit.launch(Kernel(), (1,))
    with jit.recorded() as launches:
        jit.launch(Kernel(), (3, 2), 1, BLOCK=2)
        jit.launch(Kernel(), (0,))
        jit.launch(Kernel(), (5,))
    jit.launch(Kernel(), (1,))
    assert kernels_used(launches) == [KernelUse("k", (3, 2), 2, 32, 0, 1024, 4, 1.0)]
    with pytest.raises(ValueError), jit.recorded():
        raise ValueError
    assert jit._recorder is None
    unknown = kernels_used([(SimpleNamespace(fn=SimpleNamespace(__name__="f")), (1,), None), (SimpleNamespace(), (1,), object())])
    assert [(use.name, use.registers, use.occupancy) for use in unknown] == [("f", None, None), ("kernel", None, None)]


def test_ceilings_take_the_larger_time() -> None:
    assert CEILINGS.limit(4 * 10**9, 0, "float32", writes=True) == (1.0, "copy")
    assert CEILINGS.limit(44 * 10**8, 0, "float32", writes=False) == (1.0, "read")
    assert CEILINGS.limit(10**6, 8 * 10**12, "float16", writes=True) == (10.0, "compute")


@pytest.mark.parametrize(("ours_ms", "status"), [(0.55, "at the roof"), (0.6, "good"), (0.9, "fair"), (1.1, "slow")])
def test_status_by_share_of_the_ceiling(ours_ms: float, status: str) -> None:
    assert judge(row(ours_ms)).status == status


def test_primary_issue() -> None:
    low = [KernelUse("k", (1,), 1, 255, 0, 0, 8, 0.125)]
    assert judge(row(0.5)).issue is None and judge(row(1.0)).issue == "bandwidth"
    assert judge(row(1.0, ceiling="compute")).issue == "compute"
    assert judge(row(0.5, ours=timed(0.5, 600))).issue == "launch"  # the host cannot keep up, whatever the GPU does
    assert judge(row(1.0, kernels=low)).issue == "occupancy" and judge(row(0.6, kernels=low)).issue == "bandwidth"
    forward = judge(row(0.6))
    assert judge(row(1.5, backward=True, kernels=low), forward).issue == "autograd"
    assert judge(row(0.6, backward=True), forward).issue == "bandwidth"
    assert judge(row(1.5, backward=True), judge(row(5.0))).issue == "bandwidth"


def test_ratios_limits_and_anchors() -> None:
    judged = judge(row(1.0, size="anchors", compile=timed(0.98), peers={"p": timed(3.0), "q": Timed(error="no")}, limit_ms=1.0))
    assert (judged.vs_eager, judged.vs_compile, judged.best) == (2.0, 0.98, "compile") and judged.holds and judged.within_limit
    assert judged.gbps == 1000.0 and judged.fraction == 0.5
    over = judge(row(1.0, size="anchors", compile=timed(0.97), limit_ms=0.99))
    assert over.holds is False and over.within_limit is False
    broken = judge(row(size="anchors", ours=Timed(error="x"), limit_ms=1.0))
    assert (broken.status, broken.issue, broken.holds, broken.within_limit) == ("failed", "error", False, False)
    json.dumps([judged.to_json(), broken.to_json()], allow_nan=False)


@pytest.mark.parametrize("backward", [False, True])
def test_a_row_on_the_cpu(backward: bool) -> None:
    found = measure_row(wanted(backward), CEILINGS, CPU).to_json()
    assert found["ours"]["gpu_ms"] > 0 and found["eager"]["gpu_ms"] > 0 and found["ours"]["error"] is None
    assert found["compile"] is None and found["peers"] == {} and found["bytes"] == (4 if backward else 2) * 64
    assert found["error_ours"] == found["error_eager"] == 0.0 and found["status"] == "reference" and found["elements"] == 16
    assert found["notes"] == []


def raising(*args: Any) -> Any:
    raise RuntimeError("broken\nin two lines")


def test_whatever_raises_is_an_entry() -> None:
    found = measure_row(wanted(ours=raising), CEILINGS, CPU)
    assert found.ours.error == "RuntimeError: broken" and found.eager is not None and found.eager.gpu_ms and found.status == "failed"
    assert "no error against float64" in found.notes[0]
    found = measure_row(wanted(plain=raising), CEILINGS, CPU)
    assert found.ours.gpu_ms and found.eager is not None and found.eager.error and found.vs_eager is None
    assert measure_row(wanted(make=raising), CEILINGS, CPU).ours.error == "RuntimeError: broken"
    assert [r.status for r in run([wanted(ours=raising), wanted()], CEILINGS, CPU)] == ["failed", "reference"]

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_row(wanted(ours=interrupted), CEILINGS, CPU)


def test_peers_that_cannot_be_had() -> None:
    def missing() -> Any:
        raise ImportError

    functions, failures = Subjects(wanted(peers={"a": missing, "b": raising, "c": lambda: torch.neg}), "cpu").functions(
        compiled=False, peers=True
    )
    assert list(functions) == ["ours", "eager", "c"] and list(failures) == ["b"]


@pytest.mark.parametrize("backward", [False, True])
def test_errors_against_float64_see_a_wrong_result(backward: bool) -> None:
    ours, eager = errors(Subjects(wanted(backward, ours=lambda x: 2.02 * x), "cpu"))
    assert ours == pytest.approx(0.01, rel=1e-3) and eager == 0.0
    assert errors(Subjects(wanted(ours=lambda x: x.argmax(), plain=lambda x: x.argmax()), "cpu")) == (None, None)
    both = {"ours": lambda x: (2 * x, 3.03 * x), "plain": lambda x: (x + x, 3 * x)}
    ours, _ = errors(Subjects(wanted(backward, **both), "cpu"))
    assert ours is not None and 0.001 < ours < 0.011
    nan = measure_row(wanted(ours=lambda x: x / 0 * 0), CEILINGS, CPU)
    assert nan.error_ours is None and "not finite" in nan.notes[0]


def test_functions_are_sampled_in_turn() -> None:
    called: list[str] = []
    times = time_in_turn({"a": lambda i: called.append("a"), "b": raising, "c": lambda i: called.append("c")}, 2, "cpu", 3)
    assert times["a"].gpu_ms and times["c"].gpu_ms and times["b"].error == "RuntimeError: broken"
    turns = [name for before, name in zip([None, *called], called, strict=False) if before != name]
    assert set(turns) == {"a", "c"} and len(turns) >= 5


@pytest.mark.parametrize("count", range(1, 8))
def test_orders_are_balanced(count: int) -> None:
    """Each function equally often in each place, and right after each other one: a function that leaves the GPU cool favours nobody."""
    orders = balanced_orders(count)
    places = Counter((place, one) for order in orders for place, one in enumerate(order))
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == count**2 and len(set(places.values())) == 1
    assert len(pairs) == count * (count - 1) and len(set(pairs.values())) <= 1


class FakeGpu:
    """A clock of its own: a call takes the host 10 µs and the GPU 2 µs, and the GPU starts after its sleep."""

    def __init__(self, full: int = 10**9) -> None:
        self.host_s = self.gpu_s = 0.0
        self.each_s, self.slept = 2e-6, 0
        self.full, self.queued = full, 0
        self.sets: list[int] = []

    def call(self, i: int) -> None:
        self.sets.append(i)
        self.queued += 1
        if self.queued > self.full:  # the driver's queue: the host waits for a place in it
            self.host_s = max(self.host_s, self.gpu_s - self.full * self.each_s)
        self.host_s += 10e-6
        self.gpu_s = max(self.gpu_s, self.host_s) + self.each_s

    def synchronize(self) -> None:
        self.host_s, self.queued = max(self.host_s, self.gpu_s), 0

    def _sleep(self, cycles: int) -> None:
        self.slept += 1
        self.gpu_s = max(self.gpu_s, self.host_s) + cycles / timing_module.CYCLES_PER_S

    def CUDAGraph(self) -> Any:
        gpu = self

        class Graph:
            calls = 0

            def replay(self) -> None:
                gpu.gpu_s += self.calls * 1e-6

        return Graph()

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        before, clocks = len(self.sets), (self.host_s, self.gpu_s)
        yield
        graph.calls = len(self.sets) - before
        self.host_s, self.gpu_s = clocks  # captured, not run

    def Event(self, enable_timing: bool) -> Any:
        gpu = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = gpu.gpu_s

            def query(self) -> bool:
                return gpu.host_s >= self.at

            def synchronize(self) -> None:
                gpu.synchronize()

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) * 1e3

        return Event()


@pytest.mark.parametrize("full", [10**9, 60])
def test_gpu_time_is_measured_behind_the_hosts(monkeypatch: pytest.MonkeyPatch, full: int) -> None:
    gpu = FakeGpu(full)
    monkeypatch.setattr(timing_module.torch, "cuda", gpu)
    monkeypatch.setattr(timing_module, "perf_counter", lambda: gpu.host_s)
    one = CudaTimer(gpu.call, 4)
    one.prepare()
    one.sleep_s = 1e-4 if full > 60 else one.sleep_s  # too short at first: must be noticed
    gpu_s, host_s = one.sample()
    assert one.ahead and gpu_s == pytest.approx(2e-6, rel=0.05) and host_s == pytest.approx(10e-6, rel=0.05)
    assert gpu.sets == [i % 4 for i in range(len(gpu.sets))]
    assert one.calls <= 60 or full > 60


@pytest.mark.parametrize("gpu_us", [200, 2])
def test_a_steady_sample_follows_a_tenth_of_a_second_of_the_same(monkeypatch: pytest.MonkeyPatch, gpu_us: int) -> None:
    gpu = FakeGpu(full=500)
    gpu.each_s = gpu_us * 1e-6
    monkeypatch.setattr(timing_module.torch, "cuda", gpu)
    monkeypatch.setattr(timing_module, "perf_counter", lambda: gpu.host_s)
    one = SteadyTimer(gpu.call, 4)
    one.prepare()
    began, slept, before = gpu.host_s, gpu.slept, len(gpu.sets)
    gpu_s, _ = one.sample()
    assert one.ahead and gpu_s == pytest.approx(gpu_us * 1e-6, rel=0.05)
    assert (len(gpu.sets) - before - one.calls) * max(gpu_us, 10) * 1e-6 >= 0.09 and gpu.host_s - began > 0.1
    assert (gpu.slept > slept) is (gpu_us < 10)  # only where the host would not be ahead without
    assert gpu.sets == [i % 4 for i in range(len(gpu.sets))]


def test_a_rested_sample_is_short_and_comes_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.each_s = 200e-6
    monkeypatch.setattr(timing_module.torch, "cuda", gpu)
    monkeypatch.setattr(timing_module, "perf_counter", lambda: gpu.host_s)
    one = RestedTimer(gpu.call, 4)
    one.prepare()
    began = gpu.host_s
    gpu_s, _ = one.sample()
    assert one.ahead and gpu_s == pytest.approx(200e-6, rel=0.05) and 5 <= one.calls <= 25
    assert gpu.host_s - began == pytest.approx(timing_module.REST_S + one.calls * gpu_s, rel=0.05)


def test_rows_limited_by_tensor_cores_are_sampled_alike() -> None:
    gpu = Settings("cuda", repeats=5)
    row = BenchRow("op", (4,), torch.float32, False, "large", "cuda", Timed(), ceiling="compute", ceiling_ms=0.2)
    assert _sampling(row, wanted(), gpu) == (RestedTimer, 12) and "rest" in row.notes[0]
    assert _sampling(row, wanted(), replace(gpu, steady=True)) == (SteadyTimer, 12)
    assert _sampling(replace(row, ceiling_ms=0.02), wanted(), replace(gpu, steady=True)) == (RestedTimer, 12)
    assert _sampling(replace(row, ceiling="copy"), wanted(), gpu) == (CudaTimer, 5)
    assert _sampling(row, wanted(in_graph=True), gpu) == (GraphTimer, 5)


def test_gpu_time_in_a_graph_is_that_of_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(timing_module.torch, "cuda", gpu)
    monkeypatch.setattr(timing_module, "perf_counter", lambda: gpu.host_s)
    one = GraphTimer(gpu.call, 4)
    one.prepare()
    assert one.captured % 4 == 0 and one.captured > 4
    gpu_s, host_s = one.sample()
    assert gpu_s == pytest.approx(1e-6) and host_s == pytest.approx(10e-6, rel=0.05)


def test_input_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(L2_cache_size=60 * 2**20, total_memory=140 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert set_count(2**20, 2**20, "cuda") == 180 and set_count(1, 1, "cuda") == 256 and set_count(10**9, 10**9, "cuda") == 2
    assert set_count(2**20, 10**9, "cuda") == 8 and set_count(5 * 10**9, 5 * 10**9, "cuda") == 2
    assert set_count(40 * 10**9, 40 * 10**9, "cuda") == 1 and set_count(1, 1, "cpu") == 2


def test_history_flags_a_planted_slow_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for r in run([wanted(), wanted()], CEILINGS, CPU):
        assert r.ours.gpu_ms
    lines = history_file("cpu").read_text().splitlines()
    data = json.loads(lines[0])
    assert len(lines) == 2 and data["op"] == "double" and data["commit"] == "0" * 40 and data["date"] and data["torch"]
    monkeypatch.setattr(sys.modules[run.__module__], "_on_device", lambda *args: judge(row(1.0)))
    path = history_file("cuda")
    path.write_text(json.dumps({**data, "ours_ms": 0.5}) + "\n")
    assert next(run([wanted()], CEILINGS, Settings("cuda", repeats=2))).regression == 2.0
    path.write_text(json.dumps({**data, "ours_ms": 1e9}) + "\n")
    assert next(run([wanted()], CEILINGS, Settings("cuda", repeats=2, keep=False))).regression is None
    assert len(path.read_text().splitlines()) == 1


def test_references_have_no_regressions() -> None:
    list(run([wanted()], CEILINGS, CPU))
    path = history_file("cpu")
    path.write_text(json.dumps({**json.loads(path.read_text()), "ours_ms": 1e-9}) + "\n")
    assert next(run([wanted()], CEILINGS, CPU)).regression is None


def test_regression_is_against_the_last_five_runs() -> None:
    assert regression(1.2, [9, 1, 1, 1, 1, 1]) == pytest.approx(1.2) and regression(1.09, [1, 1]) is None
    assert regression(1.0, []) is None and regression(None, [1.0]) is None


def test_broken_history_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "x.jsonl"
    good = entry({**judge(row()).to_json(), "shape": [2, 2]})
    assert read_history(path) == {}
    append(path, good)
    with path.open("a") as stream:
        stream.write('not json\n[1]\n{"op": "double"}\n{"op": 1, "shape": 3, "dtype": 1, "backward": 0, "ours_ms": "x"}\n\n{"op": "dou')
    append(path, good)  # not glued to the line a killed process left
    assert read_history(path) == {("double", (2, 2), "float32", False): [1.0, 1.0]}
    path.write_bytes(b"\xff\xfe\x00")
    assert read_history(path) == {}


def test_appends_of_many_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = entry({**judge(row()).to_json(), "shape": [2, 2]})
    threads = [threading.Thread(target=lambda: [append(path, good) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_history(path)["double", (2, 2), "float32", False]) == 80


def won(elements: int, ours: float, eager: float, compiled: float | None, backward: bool = False, kind: str = "") -> dict[str, Any]:
    given = row(ours, eager=timed(eager), compile=None if compiled is None else timed(compiled), elements=elements, backward=backward)
    return {**given.to_json(), "kind": kind}


def test_wins_begin_where_no_larger_row_is_lost() -> None:
    rows = [won(10, 1.0, 2.0, 2.0), won(20, 1.0, 0.5, 1.0), won(40, 1.0, 1.0, 1.04), won(80, 1.0, 3.0, 1.04)]
    assert wins_table(rows) == {"double||float32": {"eager": 40, "compile": 40}}
    assert wins_table([*rows, won(80, 1.0, 0.9, 1.02, backward=True)]) == {"double||float32": {"eager": None, "compile": None}}
    assert wins_table([*rows, won(80, 1.0, 3.0, None, backward=True)]) == {"double||float32": {"eager": 40, "compile": 40}}
    assert wins_table([won(10, 1.0, 1.0, None, kind="wide")]) == {"double|wide|float32": {"eager": 10, "compile": None}}
    host = won(10, 0.05, 0.06, 0.06)
    host["ours"]["host_us"], host["eager"]["host_us"] = 100.0, 10.0  # 0.15 against 0.07 ms, and the GPU has to wait
    assert wins_table([host]) == {"double||float32": {"eager": None, "compile": 10}}
    busy = won(10, 1.0, 1.05, 1.04)
    busy["ours"]["host_us"], busy["eager"]["host_us"] = 100.0, 10.0  # 1.1 against 1.06 ms, but launches are ahead of the GPU
    assert wins_table([busy]) == {"double||float32": {"eager": 10, "compile": 10}}
    both = {**busy, "backward": True, "ours": {**busy["ours"], "gpu_ms": 0.5}, "eager": {**busy["eager"], "gpu_ms": 0.55}}
    assert wins_table([busy, both]) == {"double||float32": {"eager": None, "compile": 10}}  # less than six calls' worth of work
    lost = won(10, 1.0, 1.0, 2.0)
    lost["ours"]["gpu_ms"] = None
    assert wins_table([lost]) == {"double||float32": {"eager": None, "compile": None}}


def test_tuning_finds_the_spaces_a_call_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    work: list[int] = []

    def seconds(step: Any, sets: int, device: str) -> float:
        step(0)
        return work[-1] * 1e-6

    monkeypatch.setattr(tune_module, "gpu_seconds", seconds)
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_spaces", dict(tuning._spaces))
    tuning.space("bench_test", __file__, [{"WORK": 4000}, {"WORK": 1000}])
    default = {"WORK": 1}

    def step(i: int) -> object:
        chosen = tuning.config("bench_test", (7,), default)
        tuning.config("no_space", (1,), {})
        return work.append(chosen["WORK"])

    assert looked_up(step) == {("bench_test", (7,)): default, ("no_space", (1,)): {}}
    (said,) = tune_step(step, 1, "cpu")
    assert "WORK=1 " in said and tuning.config("bench_test", (7,), {}) == default  # the default beats both candidates, and stays
    tuning._known.clear()
    default["WORK"] = 8000
    (said,) = tune_step(step, 1, "cpu")
    assert "WORK=1000 " in said and tuning.config("bench_test", (7,), {}) == {"WORK": 1000}
    assert tune_step(lambda i: None, 1, "cpu") == ["nothing to tune"] and "not tuned" in tune_step(raising, 1, "cpu")[0]
    assert json.loads(tuning.cache_file().read_text()).popitem()[1] == {"WORK": 1000}


def test_only_cuda_and_the_cpu_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_device("cpu")
    for device in ("cuda", "cuda:1", "mps", "cpu:x", "cpu:1", "cpu:", "cpux", ""):
        with pytest.raises(MeasureError):
            check_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "cuda:0", "cuda:1"):
        check_device(device)
    for device in ("cuda:2", "cuda:x", "cuda:-1", "cuda:", "cuda:²"):
        with pytest.raises(MeasureError):
            check_device(device)


def test_the_shipped_table_follows_from_the_committed_rows() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "kernel-wins-h200.json").read_text())["rows"]
    lines = {name: line for name, line in wins_table(rows).items() if line["eager"] is not None or line["compile"] is not None}
    assert json.loads((tuning.TABLES / "nvidia-h200-wins.json").read_text()) == lines
