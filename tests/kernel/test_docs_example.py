"""The worked example of docs/kernels.md really works: its three files are taken out of the page and run.

page ──code blocks by the path in their first line──> a folder that ridgeline.kernel also looks in ──> subprocesses
  reference against torch on the CPU, the numeric test interpreted, the machine-code test compiled, the bench row
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT

BLOCK = re.compile(r"^```python\n# ((?:src|tests)/\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = (
    "src/ridgeline/kernel/square_relu.py",
    "tests/kernel/numerics/test_square_relu.py",
    "tests/kernel/compiled/test_square_relu_code.py",
)
INTERPRET = "0" if torch.cuda.is_available() else "1"
OPENING = "import ridgeline.kernel\nridgeline.kernel.__path__.append({folder!r})\n"
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install 'ridgeline[gpu]'"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files; the kernel in a folder of its own, since that room imports every file it finds."""
    blocks = {path: text for path, text in BLOCK.findall((ROOT / "docs" / "kernels.md").read_text())}
    assert tuple(blocks) == FILES
    for path, text in blocks.items():
        home = tmp_path / "kernel" if path.startswith("src/") else tmp_path
        home.mkdir(exist_ok=True)
        (home / Path(path).name).write_text(text)
    opening = OPENING.format(folder=str(tmp_path / "kernel"))
    (tmp_path / "conftest.py").write_text(f"{opening}from tests.kernel.conftest import device  # noqa: F401\n")
    return tmp_path


def run(command: list[str], folder: Path, interpret: str = "0") -> str:
    """Output of a Python process that has the repository, and a cache of its own."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": interpret, "TRITON_DEFAULT_FP_FUSION": "1",
                   "RIDGELINE_CACHE": str(folder / "cache")}  # fmt: skip
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def run_code(code: str, folder: Path, *arguments: str) -> str:
    script = folder / "script.py"
    script.write_text(OPENING.format(folder=str(folder / "kernel")) + code)
    return run([str(script), *arguments], folder)


def run_test(name: str, folder: Path, interpret: str) -> str:
    return run(["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder / name)], folder, interpret)


REFERENCE = """
import torch
from ridgeline.kernel.square_relu import square_relu
from ridgeline.kernel.use import load_operators
x = torch.randn(7, 9, requires_grad=True)
compiled = torch.compile(square_relu, fullgraph=True, backend="aot_eager")
for function in (square_relu, compiled):
    ours, = torch.autograd.grad(function(x).sum(), x)
    plain, = torch.autograd.grad(torch.relu(x).square().sum(), x)
    assert torch.equal(function(x), torch.relu(x).square()) and torch.allclose(ours, plain)
assert "square_relu" in load_operators()
print("agrees")
"""


def test_reference_agrees_with_torch(folder: Path) -> None:
    assert run_code(REFERENCE, folder).strip() == "agrees"


def test_bench_finds_the_row(folder: Path) -> None:
    command = "from ridgeline.cli.main import main\nmain()\n"
    rows = json.loads(run_code(command, folder, "bench", "square_relu", "--device", "cpu", "--fast", "--backward", "--json"))["rows"]
    assert {row["op"] for row in rows} == {"square_relu"} and {row["backward"] for row in rows} == {False, True}
    assert all(row["ours"]["gpu_ms"] > 0 and row["ours"]["error"] is None for row in rows)


@NEEDS_TRITON
def test_its_numeric_test_passes(folder: Path) -> None:
    output = run_test("test_square_relu.py", folder, INTERPRET)
    assert " passed" in output and "skipped" not in output, output


@NEEDS_TRITON
def test_its_numeric_test_sees_a_planted_error(folder: Path) -> None:
    kernel = folder / "kernel" / "square_relu.py"
    text = kernel.read_text()
    assert text.count("kept * kept, mask") == 1
    kernel.write_text(text.replace("kept * kept, mask", "1.01 * kept * kept, mask"))
    with pytest.raises(AssertionError, match="errors"):
        run_test("test_square_relu.py", folder, INTERPRET)


@NEEDS_TRITON
def test_its_machine_code_test_passes(folder: Path) -> None:
    run_test("test_square_relu_code.py", folder, "0")
