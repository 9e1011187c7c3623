"""Figures in the docs come from committed result files, and the pages named in the navigation exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("label", ["cpu", "h200"])
def test_accuracy_page_equals_its_results(label: str) -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / f"analyze-latency-{label}.json").read_text())
    assert {"schema", "machine", "versions", "commit", "command", "rows"} <= set(data) and re.fullmatch(r"[0-9a-f]{40}", data["commit"])
    page, readme = (ROOT / "docs" / "accuracy.md").read_text(), (ROOT / "README.md").read_text()
    for row in data["rows"]:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        times = f"{row['predicted_s'] * 1e3:.3f} ms | {row['measured_s'] * 1e3:.3f} ms | {row['error']:+.1%}"
        assert f"| {row['model']} | {row['batch']} | {row['dtype']} | {row['limit_s'] * 1e3:.3f} ms | {times} |" in page
    errors = [abs(row["error"]) for row in data["rows"]]
    summary = f"mean absolute error {sum(errors) / len(errors):.1%}, median {median(errors):.1%}, worst {max(errors):.1%}"
    assert summary in page and summary in readme


def test_cpu_predictions_hold_the_bar() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "analyze-latency-cpu.json").read_text())["rows"]
    wanted = {(model, batch) for model in ("resnet18", "mobilenet-v2", "vit-b16", "bert-base") for batch in (1, 8)}
    assert {(row["model"], row["batch"]) for row in rows} == wanted
    assert all(abs(row["error"]) <= 0.30 for row in rows)


def test_navigation_and_pictures_exist() -> None:
    pages = re.findall(r":\s*([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert len(pages) >= 9 and all((ROOT / "docs" / page).exists() for page in pages)
    for text in ("README.md", *(f"docs/{page}" for page in pages)):
        base = ROOT / text
        for link in re.findall(r"\]\(([^)#:]+)\)", base.read_text()):
            assert (base.parent / link).exists(), f"{text}: {link}"


def results(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert {"schema", "machine", "versions", "commit", "command", "rows"} <= set(data) and re.fullmatch(r"[0-9a-f]{40}", data["commit"])
    return data


def search_summary() -> dict[tuple[str, str], str]:
    """The page's table of search times: one line an array and objective."""
    rows = [row for row in results("npu-search-cpu")["rows"] if row["layer"] != "all"]
    lines = {}
    for target, objective in dict.fromkeys((row["target"], row["objective"]) for row in rows):
        chosen = [row for row in rows if (row["target"], row["objective"]) == (target, objective)]
        cpu = [row["cpu_s"] for row in chosen]
        best = sum(row["optimal_within_space"] for row in chosen)
        times = f"{sum(cpu) / len(cpu):.2f} s | {max(cpu):.2f} s"
        lines[target, objective] = (
            f"| {target} | {objective} | {times} | {best} of {len(chosen)} | {max(row['gap'] for row in chosen):.0%} |"
        )
    return lines


def test_npu_page_equals_its_search_results() -> None:
    page, readme = (ROOT / "docs" / "npu.md").read_text(), (ROOT / "README.md").read_text()
    for line in search_summary().values():
        assert line in page, line
    rows = results("npu-search-cpu")["rows"]
    for row in rows:
        if row["layer"] == "all":
            assert f"| {row['model']}, {row['layers']} layers | {row['target']} | {row['objective']} | {row['cpu_s']:.1f} s |" in page
        elif row["objective"] == "energy" and row["zigzag_energy_pj"]:
            assert row["energy_pj"] <= row["zigzag_energy_pj"]
            both = f"{row['zigzag_energy_pj'] / 1e6:.1f} µJ | {row['energy_pj'] / 1e6:.1f} µJ"
            assert f"| {row['layer']} | {row['target']} | {both} | {row['energy_pj'] / row['zigzag_energy_pj'] - 1:+.1%} |" in page
    energy, others = (
        [row for row in rows if row["layer"] != "all" and (row["objective"] == "energy") == wanted] for wanted in (True, False)
    )
    assert all(row["optimal_within_space"] for row in (*energy, *others))
    times = [sum(row["cpu_s"] for row in some) / len(some) for some in (energy, others)]
    assert f"for energy ({times[0]:.2f} CPU s a layer), energy-delay and time ({times[1]:.2f})" in readme


def test_npu_page_equals_its_doublings() -> None:
    rows = results("npu-monotone-model")["rows"]
    lines = ["| array | objective | doublings | both answers optimal | rises | largest |", "| --- | --- | --- | --- | --- | --- |"]
    for target, objective in dict.fromkeys((row["target"], row["objective"]) for row in rows):
        some = [row for row in rows if (row["target"], row["objective"]) == (target, objective)]
        rises = [row["rise"] for row in some if row["rise"]]
        optimal = sum(row["both_optimal"] for row in some)
        lines.append(f"| {target} | {objective} | {len(some)} | {optimal} | {len(rises)} | {max(rises, default=0):.2%} |")
    assert between("docs/npu.md", "npu-monotone").strip() == "\n".join(lines)
    assert not any(row["rise"] for row in rows)
    assert f"no rise in {len(rows):,} doublings of a memory or port" in (ROOT / "README.md").read_text()


def test_npu_search_holds_its_bars() -> None:
    rows = results("npu-search-cpu")["rows"]
    for target in ("tpu-like", "eyeriss-like"):
        for objective in ("energy", "edp", "latency"):
            cpu = [r["cpu_s"] for r in rows if (r["target"], r["objective"]) == (target, objective) and r["layer"] != "all"]
            assert len(cpu) == 12 and sum(cpu) / len(cpu) < 1.0
        assert all(r["cpu_s"] < 30 for r in rows if r["layer"] == "all" and r["target"] == target)


def test_npu_page_equals_its_silicon_results() -> None:
    page = (ROOT / "docs" / "npu.md").read_text()
    for row in results("npu-silicon-eyeriss")["rows"]:
        assert abs(row["error"]) <= 0.10
        times = f"{row['measured_ms']:.1f} ms | {row['modelled_ms']:.2f} ms | {row['error']:+.1%} | {row['computing_ms']:.2f} ms"
        assert f"| {row['layer']} | {times} | {row['passes']} |" in page
    worst = max(abs(row["error"]) for row in results("npu-silicon-eyeriss")["rows"])
    assert f"processing time within {worst:.1%} of the chip" in (ROOT / "README.md").read_text()


def test_npu_page_equals_its_lowering_results() -> None:
    page = (ROOT / "docs" / "npu.md").read_text()
    rows = [row for row in results("npu-lowering-cpu")["rows"] if row["nest"] == "recommended"]
    assert any("256 to 256" in row["layer"] for row in rows)
    for row in rows:
        assert f"| {row['layer']} | {row['speedup']:.1f}x |" in page
        assert row["speedup"] >= 5 or "256 to 256" not in row["layer"]


def test_npu_page_equals_its_schedule_results() -> None:
    page = (ROOT / "docs" / "npu.md").read_text()
    hidden = [abs(row["difference"]) for row in results("npu-schedule-model")["rows"] if row["refills_hide"]]
    near = sum(difference <= 0.01 for difference in hidden)
    assert near == len(hidden) > 100
    assert f"of {len(hidden)} mappings whose refills hide, {near} within 1 %, the worst {max(hidden) * 100:.1f} % apart" in page


def between(page: str, marker: str) -> str:
    """What stands between `<!-- marker -->` and the next `<!-- end -->` of a page."""
    return (ROOT / page).read_text().split(f"<!-- {marker} -->\n")[1].split("<!-- end -->")[0]


HEAD = ("op", "shape", "dtype", "pass", "ours", "eager", "compile", "others", "of ceiling", "limit", "against the best other")
EXCERPT = [
    ("cross_entropy", "8192x32000", True),
    ("linear_cross_entropy", "8192x4096x128256", True),
    ("softmax", "4096x32768", False),
    ("layer_norm", "16384x4096", True),
    ("rms_norm", "16384x4096", True),
    ("swiglu", "8192x14336", True),
    ("sum_all", "64x4096x4096", False),
    ("matmul", "4096x4096x4096", False),
]
Row = dict[str, Any]


def shape_of(row: Row) -> str:
    return "x".join(map(str, row["shape"]))


def milliseconds(timed: Row | None) -> str:
    """Three digits; † where the host did not queue ahead, so that the time holds waits."""
    if timed is None:
        return "-"
    return f"{timed['gpu_ms']:#.3g}{'' if timed['ahead'] else '†'}" if timed["gpu_ms"] else "failed"


def verdict(row: Row) -> str:
    """How many times as fast as the best other; below 1, ours is slower, and lost where it takes over 1.03 times as long.

    † where one of the others has one: its kernels alone may be the best.
    """
    if row["vs_best"] is None:
        return "-" if row["ours"]["gpu_ms"] else "**failed**"
    waits = any(timed and timed["gpu_ms"] and not timed["ahead"] for timed in (row["eager"], row["compile"], *row["peers"].values()))
    text = f"{row['vs_best']:.2f}x {row['best']}{'†' if waits else ''}"
    return text if row["holds"] else f"**{text}: lost**"


def anchor_cells(row: Row) -> list[str]:
    """One row of the table, in the order of HEAD."""
    limit = "-" if row["limit_ms"] is None else f"{row['limit_ms']:#.3g}" if row["within_limit"] else f"**{row['limit_ms']:#.3g}: over**"
    others = ", ".join(f"{name} {milliseconds(timed)}" for name, timed in row["peers"].items()) or "-"
    reached = f"{row['fraction']:.0%} {row['ceiling']}" if row["fraction"] else "-"
    times = [milliseconds(row[name]) for name in ("ours", "eager", "compile")]
    named = [row["op"], shape_of(row), row["dtype"], "f+b" if row["backward"] else "fwd"]
    return [*named, *times, others, reached, limit, verdict(row)]


def table(head: tuple[str, ...], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def kernel_anchors(data: Row) -> str:
    """Machine, every row, and how many stand where."""
    from ridgeline.report.bench_table import heading, summary

    lines = table(HEAD, [anchor_cells(row) for row in data["rows"]])
    return f"\n{heading({**data, 'ceilings': data['machine']['ceilings']})}\n\n{lines}\n{summary(data)}. {libraries(data)}\n\n"


def libraries(data: Row) -> str:
    """Which other libraries the rows were held against, and which the cases name but could not be imported."""
    from ridgeline.kernel.bench import load_cases

    there = {name for row in data["rows"] for name in row["peers"]}
    named = {name for row in data["rows"] for name in load_cases()[row["op"]].peers}
    spoken = {"liger": "Liger", "flag_gems": "FlagGems"}
    measured, missing = (" and ".join(sorted(spoken.get(n, n) for n in names)) or "none" for names in (there, named - there))
    return f"Other libraries measured: {measured}; not importable in this run: {missing}."


def kernel_excerpt(data: Row) -> str:
    """Some rows for the README, always with the one that stands worst against the best other, and all that are lost by name."""
    rows = data["rows"]
    worst = min((row for row in rows if row["vs_best"] is not None), key=lambda row: row["vs_best"])
    chosen = [row for row in rows if (row["op"], shape_of(row), row["backward"]) in EXCERPT]
    chosen += [] if worst in chosen else [worst]
    lost = [f"{row['op']} {shape_of(row)} {'f+b' if row['backward'] else 'fwd'}" for row in rows if not row["holds"]]
    keep = [place for place, name in enumerate(HEAD) if name not in ("dtype", "limit", "others")]
    lines = [[anchor_cells(row)[place] for place in keep] for row in chosen]
    said = f"{len(rows) - len(lost)} of {len(rows)} rows take at most 1.03 times the best other's time"
    rest = f"{said}; not: {', '.join(lost) or 'none'}. {libraries(data)}"
    rest += " †: one of the others waits for the GPU inside; its kernels alone may be faster." if "†" in str(lines) else ""
    return f"\n{table(tuple(HEAD[place] for place in keep), lines)}\nTimes in ms. {rest}\n\n"


def kernel_attention(data: Row) -> str:
    """Why torch's attention stays."""
    rows = [row for row in data["rows"] if row["op"] == "flash_attention"]
    words = [
        f"{shape_of(row)} {row['dtype']} {'forward and backward' if row['backward'] else 'forward'}: ours "
        f"{milliseconds(row['ours'])} ms, torch's {milliseconds(row['eager'])} ms"
        for row in rows
    ]
    return f"Causal, {'; '.join(words)}.\n"


def kernel_steady(data: Row) -> str:
    """Rows that tensor cores limit, under lasting load: calls long enough for the GPU to be busy throughout."""
    keep = [place for place, name in enumerate(HEAD) if name not in ("dtype", "limit", "others", "of ceiling")]
    rows = [row for row in data["rows"] if row["ceiling"] == "compute" and row["ceiling_ms"] >= 0.1]
    return "\n" + table(tuple(HEAD[place] for place in keep), [[anchor_cells(row)[place] for place in keep] for row in rows]) + "\n"


def kernel_rows(data: Row) -> str:
    """Rows without a limit of their own, and how many are lost."""
    keep = [place for place, name in enumerate(HEAD) if name not in ("dtype", "limit", "others")]
    held = [{**row, "holds": row["vs_best"] >= 1 / 1.03} for row in data["rows"]]
    lines = [[anchor_cells(row)[place] for place in keep] for row in held]
    lost, to_eager = sum(not row["holds"] for row in held), sum(row["vs_eager"] < 1 / 1.03 for row in held)
    said = f"Of {len(held)} rows {lost} take over 1.03 times as long as the faster of eager and torch.compile, {to_eager} as eager alone."
    return f"\n{table(tuple(HEAD[place] for place in keep), lines)}\n{said}\n\n"


def kernel_training(data: Row) -> str:
    """Time of a step and loss, with and without."""
    head = ("variant", "sequences", "steps", "a step", "times as fast", "largest difference of the loss", "ran in place of torch's")
    lines = []
    for row in data["rows"]:
        ran = ", ".join(f"{name} {times}" for name, times in row["replaced"].items()) or "-"
        named = [row["variant"], str(row["batch"]), str(10 * len(row["losses"]))]
        lines.append([*named, f"{row['step_ms']:.2f} ms", f"{row['speedup']:.3f}x", f"{row['largest_loss_difference']:.2%}", ran])
    first = data["rows"][0]
    model = f"{first['layers']} layers, {first['width']} wide, sequences of {first['tokens']} tokens"
    return f"\n{model}:\n\n{table(head, lines)}\n"


PUBLIC = {  # operators whose public function has another name, or more than one
    "attention": ["attention", "flash_attention"],
    "gelu_tanh": ["gelu"],
    "softmax": ["softmax", "log_softmax"],
    "matmul": ["matmul", "linear"],
}
INNER = {"add_scalar": "add", "mul_scalar": "mul", "matmul_kept": "matmul", "scale_in_place": "linear_cross_entropy"}
SHARED = {"gelu_tanh": "gelu", "rope_one": "rope"}
"""INNER: operators that only another one calls; like those that end in _backward and _out, they have no line.
SHARED: operators whose stand-in is another's."""


def torch_names() -> dict[Any, str]:
    """What users call torch's functions: the shortest of a function's names, torch.mm being torch.dsmm too."""
    import torch

    found: dict[Any, str] = {}
    for prefix, place in (("F", torch.nn.functional), ("torch", torch), ("Tensor", torch.Tensor)):
        here: dict[Any, str] = {}
        for name in sorted(dir(place), key=len):
            one = getattr(place, name, None)
            if callable(one) and type(one).__hash__ is not None and (not name.startswith("_") or name == "__matmul__"):
                here.setdefault(one, f"{prefix}.{name}")
        found = {**here, **found}
    return found


def kernel_operators() -> str:
    """Every public operator with its file, gradient, and what it stands in for."""
    from ridgeline.kernel.library import OPERATORS
    from ridgeline.kernel.replace import REPLACEMENTS
    from ridgeline.kernel.use import load_operators

    load_operators()
    names = torch_names()
    lines = []
    for name, one in sorted(OPERATORS.items(), key=lambda item: (item[1].launch.__module__, item[0])):
        if not one.launch.__module__.startswith("ridgeline.kernel.") or name in INNER or name.endswith(("_backward", "_out")):
            continue
        stands_for = [function for function, (op, _) in REPLACEMENTS.items() if op == SHARED.get(name, name)]
        said = ", ".join(f"`{names.get(f) or f.__module__.removeprefix('ridgeline.') + '.' + f.__name__}`" for f in stands_for)
        calls = ", ".join(f"`{call}`" for call in PUBLIC.get(name, [name]))
        file = home(name, PUBLIC.get(name, [name])).rpartition(".")[2]
        yes = {True: "yes", False: "no"}
        lines.append([calls, f"`{name}`", f"`{file}.py`", yes[one.differentiable], yes[one.deterministic], said or "-"])
    return "\n" + table(("call", "operator", "file", "gradient", "deterministic", "stands in for"), lines) + "\n"


def home(name: str, calls: list[str]) -> str:
    """The module that has all of an operator's public functions: its launcher's, or the one its kernels serve."""
    import sys

    from ridgeline.kernel.library import OPERATORS

    near = OPERATORS[name].launch.__module__
    for module in (near, *(m for m in sorted(sys.modules) if m.startswith("ridgeline.kernel."))):
        if all(getattr(getattr(sys.modules[module], call, None), "__module__", None) == module for call in calls):
            return module
    raise AssertionError(f"no file has {calls}, the public functions of operator {name}: name them in PUBLIC, or the operator in INNER")


def test_kernel_page_names_every_operator() -> None:
    from ridgeline.kernel.library import OPERATORS

    page = between("docs/kernels.md", "kernel-operators")
    assert page == kernel_operators()
    assert set(INNER) | set(PUBLIC) <= set(OPERATORS)
    for name, one in OPERATORS.items():
        if one.differentiable and name not in INNER and one.launch.__module__.startswith("ridgeline.kernel."):
            assert f"| `{name}` |" in page, name


def test_kernel_pages_equal_their_results() -> None:
    data = results("kernel-anchors-h200")
    assert between("docs/kernels.md", "kernel-anchors") == kernel_anchors(data)
    assert between("README.md", "kernel-excerpt") == kernel_excerpt(data)
    assert between("docs/kernels.md", "kernel-attention") == kernel_attention(data)
    assert between("docs/kernels.md", "kernel-steady") == kernel_steady(results("kernel-steady-h200"))
    assert between("docs/kernels.md", "kernel-rows") == kernel_rows(results("kernel-rows-h200"))
    gelu = [row for row in results("kernel-rows-h200")["rows"] if row["op"] == "matmul_gelu" and not row["backward"]]
    assert len(gelu) == 7 and all(row["vs_eager"] > 1 for row in gelu), "the page says one kernel is faster than two"
    assert {row["op"] for row in data["rows"]} >= {op for op, _, _ in EXCERPT} | {"attention"}
    assert all(row["vs_eager"] < 1 for row in data["rows"] if row["op"] == "flash_attention"), "the page says torch's attention is faster"
    page = (ROOT / "docs" / "kernels.md").read_text()
    nearest = [row["vs_best"] for row in results("kernel-anchors-h200-earlier")["rows"] if row["best"] == "flag_gems"]
    assert "cross-entropy forward (ours {:.2f}x and {:.2f}x) and layer norm forward ({:.2f}x)".format(*nearest) in page
    int4 = next(row for row in data["rows"] if row["op"] == "int4_linear" and row["shape"][1:] == [4096, 14336])
    assert f"{int4['fraction']:.0%}".replace("%", " %") + " of the run's own read ceiling" in page


def test_kernel_anchors_are_all_measured() -> None:
    from ridgeline.kernel.bench import load_cases, planned

    wanted = {(row.key[0], row.key[1], row.key[2], row.key[3]) for row in planned(load_cases().values(), ["anchors"])}
    rows = results("kernel-anchors-h200")["rows"]
    assert {(row["op"], tuple(row["shape"]), row["dtype"], row["backward"]) for row in rows} == wanted
    assert all(row["compile"] is not None for row in rows)


def test_kernel_page_equals_its_training_results() -> None:
    data = results("kernel-training-h200")
    assert between("docs/kernels.md", "kernel-training") == kernel_training(data)
    assert {row["variant"] for row in data["rows"]} == {"eager", "eager with kernels", "compiled", "compiled with kernels"}
    times = {row["batch"]: row["speedup"] for row in data["rows"] if row["variant"] == "eager with kernels"}
    said = f"{times[64]:.2f} times as fast with 64 sequences of 1024 tokens, where the GPU is the limit, and {times[16]:.2f} times with 16"
    readme, page = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/kernels.md"))
    assert said in readme
    losses = {row["variant"]: row["losses"] for row in data["rows"] if row["batch"] == 64}
    ours, compiled = (apart(losses[name], losses["eager"]) for name in ("eager with kernels", "compiled"))
    assert f"within {ours:.2%} of plain torch's at every tenth of {10 * len(losses['eager'])} steps" in readme
    said = f"ours was at most {ours:.2%} away from plain eager torch in {10 * len(losses['eager'])} steps, and plain compiled torch "
    assert said + f"{compiled:.2%} away from plain eager torch in {10 * len(losses['compiled'])}" in page


def apart(losses: list[float], others: list[float]) -> float:
    """The largest relative difference over the steps both have."""
    return max(abs(a / b - 1) for a, b in zip(losses, others, strict=False))


def test_kernel_page_equals_its_memory_results() -> None:
    row = results("kernel-memory-h200")["rows"][0]
    ours, eager = (f"{row[name] / 2**30:.2f} GiB" for name in ("ours_bytes", "eager_bytes"))
    said = f"`linear_cross_entropy` at {shape_of(row)} takes {ours} beyond its inputs, eager torch {eager}"
    assert said in " ".join((ROOT / "docs" / "kernels.md").read_text().split())


def test_kernel_page_is_right_about_tables_and_look_ups() -> None:
    from ridgeline.kernel.tuning import TABLES
    from ridgeline.kernel.use import Trial

    page = (ROOT / "docs" / "kernels.md").read_text()
    assert f"{Trial.UNCOUNTED} passes that do not count and {Trial.COUNTED} that do" in " ".join(page.split())
    assert [path.name for path in TABLES.glob("*-wins.json")] == ["nvidia-h200-wins.json"], "the page says that only the H200 has a table"


def test_optimize_page_runs_as_printed(tmp_path: Path) -> None:
    code = "\n".join(
        re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "optimize.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ reports; \d+ bytes of arena\n", done.stdout)
