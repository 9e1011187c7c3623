"""Crossbars on a GPU: codes exact in every number type, one CUDA graph a pass, noise the same as on a CPU, faster than plain torch.

The fused engine's own numerics run here too: tests/kernel/numerics/test_crossbar_fused.py, with all 500 configurations.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from ridgeline.crossbar.cells import program  # noqa: E402
from ridgeline.crossbar.engine.blocked import BlockedEngine  # noqa: E402
from ridgeline.crossbar.engine.fused import FusedEngine  # noqa: E402
from ridgeline.crossbar.layer.convert import set_chip, set_engine, to_crossbar  # noqa: E402
from ridgeline.crossbar.layer.layers import products, set_call  # noqa: E402
from ridgeline.crossbar.plan import Draw, Plan  # noqa: E402
from tests.crossbar.support import chip  # noqa: E402

CALL = Draw(1, 2, 3, 4)


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("dot", ["float8", "int8", "float16"])
def test_codes_are_exact_in_every_type(dot: str, rows: int) -> None:
    plan = Plan(chip(array_rows=rows, array_columns=rows), 1152, 96)
    torch.manual_seed(0)
    x = torch.randn(2, 400, 1152, device="cuda")
    cells = program(torch.randn(1, 1152, 96, device="cuda"), plan, CALL)
    engine, blocked = FusedEngine(dot), BlockedEngine()
    expected = blocked.codes(x, plan, blocked.prepare(plan, cells), CALL)
    assert torch.equal(engine.codes(x, plan, engine.prepare(plan, cells), CALL).long(), expected)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    parts = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, stride=2, groups=4), torch.nn.Flatten()]
    return torch.nn.Sequential(*parts, torch.nn.Linear(32 * 7 * 7, 10)).eval()


@pytest.mark.parametrize("changes", [{}, {"cell_read_sigma": 0.05}, {"cell_write_sigma": 0.05, "adc_noise_lsb": 0.5, "adc_levels": 256}])
def test_a_chip_is_the_same_on_cpu_and_gpu(changes: dict[str, float]) -> None:
    """Float16 levels move some sums over half a step; another chip and call move far more."""
    torch.manual_seed(1)
    x = torch.rand(4, 3, 16, 16)
    analog = to_crossbar(network(), chip(**changes), seed=7)
    with torch.inference_mode():
        set_chip(analog, 1)
        set_call(analog, 1)
        other = analog(x)
        set_chip(analog, 0)
        set_call(analog, 0)
        on_cpu = analog(x)
        found = analog.cuda()(x.cuda()).cpu()
        digital = network()(x)
    assert {product.report()["engine"] for product in products(analog).values()} == {"fused"}
    error = float((found - on_cpu).norm())
    assert error <= (0.25 * float((other - on_cpu).norm()) if changes else 1e-3 * float((on_cpu - digital).norm()))


def test_a_pass_is_one_graph() -> None:
    analog, x = to_crossbar(network(), chip()).cuda(), torch.rand(8, 3, 16, 16, device="cuda")
    with torch.inference_mode():
        expected = analog(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = analog(x)
        graph.replay()
        assert torch.equal(captured, expected)


def test_fused_is_faster_than_blocked_and_needs_less() -> None:
    plan_chip = chip(array_rows=64, array_columns=64)
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1)).eval()
    analog, x = to_crossbar(model, plan_chip).cuda(), torch.rand(16, 64, 56, 56, device="cuda")
    times, peaks = {}, {}
    for engine in ("blocked", "fused"):
        set_engine(analog, engine)
        with torch.inference_mode():
            for _ in range(2):
                analog(x)
            torch.cuda.reset_peak_memory_stats()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            analog(x)
            end.record()
            torch.cuda.synchronize()
        times[engine], peaks[engine] = start.elapsed_time(end), torch.cuda.max_memory_allocated()
    assert times["fused"] * 5 < times["blocked"]
    assert peaks["fused"] < peaks["blocked"]


def test_other_calls_draw_other_noise() -> None:
    plan = Plan(chip(cell_read_sigma=0.05), 128, 32)
    x, cells = torch.rand(1, 64, 128, device="cuda"), program(torch.randn(1, 128, 32, device="cuda"), plan, CALL)
    engine = FusedEngine()
    prepared = engine.prepare(plan, cells)
    first, again, other = (engine.product(x, plan, prepared, draw) for draw in (CALL, CALL, replace(CALL, call=5)))
    assert torch.equal(first, again) and not torch.equal(first, other)
