"""`file.py:function`: what is passed to it, where it is built, what it may return, and how its failures read."""

from __future__ import annotations

import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from ridgeline import capture
from ridgeline.core.errors import CaptureError, ModelFileError, OptionError, UnknownNameError
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.factory import build_factory

HEAD = "import torch\nfrom torch import nn\n"


def write(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
    return str(path)


PLAIN = """
def make():
    return nn.Linear(8, 16), torch.randn(4, 8)
"""
TAKES_ALL = """
def make(batch=1, *, dtype=torch.float32, device="cpu", phase=None, context=2):
    assert isinstance(dtype, torch.dtype)
    make.seen = (batch, dtype, device, phase, context)
    return nn.Linear(8, 16, dtype=dtype, device=device), (torch.randn(batch, context, 8, dtype=dtype, device=device),)
"""


def test_a_module_and_a_tensor(tmp_path: Path) -> None:
    file = write(tmp_path / "net.py", PLAIN)
    workload = capture(f"{file}:make")
    assert (workload.model, workload.batch, workload.dtype, workload.matmul_flops) == ("net.py:make", 4, "float32", 2 * 4 * 8 * 16)
    case = build_factory(f"{file}:make", CaseOptions())
    assert case.args[0].is_meta and all(p.is_meta and not p.requires_grad for p in case.module.parameters()) and not case.module.training


def test_inputs_may_be_a_dict_or_a_case(tmp_path: Path) -> None:
    body = """
    from ridgeline.workload.case import ModelCase

    class Scale(nn.Module):
        def forward(self, x, *, by):
            return x * by

    def named():
        return Scale(), {"x": torch.randn(2, 3), "by": torch.randn(3)}

    def case():
        return ModelCase("mine", Scale(), (torch.randn(2, 3),), 7, "float32", {"by": torch.randn(3)})
    """
    file = write(tmp_path / "net.py", body)
    assert capture(f"{file}:named").flops == 6
    workload = capture(f"{file}:case")
    assert (workload.model, workload.batch, workload.flops) == ("mine", 7, 6)


def test_given_options_are_passed(tmp_path: Path) -> None:
    file = write(tmp_path / "net.py", TAKES_ALL)
    case = build_factory(f"{file}:make", CaseOptions(3, "float16", "decode", 5, "cpu"))
    assert (case.batch, case.dtype, case.phase, case.context) == (3, "float16", "decode", 5)
    assert case.args[0].shape == (3, 5, 8) and case.args[0].dtype == torch.float16
    default = build_factory(f"{file}:make", CaseOptions())
    assert default.args[0].shape == (1, 2, 8) and default.args[0].is_meta
    rebatch = capture(f"{file}:make", batch=2).rebatch
    assert rebatch is not None and rebatch(6).batch == 6


def test_keywords_of_any_name_are_taken(tmp_path: Path) -> None:
    file = write(
        tmp_path / "net.py",
        "def make(**given):\n    return nn.Linear(given['context'], 1), torch.randn(given['batch'], given['context'])\n",
    )
    assert build_factory(f"{file}:make", CaseOptions(batch=2, context=6)).args[0].shape == (2, 6)


@pytest.mark.parametrize(
    ("options", "name"), [(CaseOptions(batch=2), "batch"), (CaseOptions(phase="decode"), "phase"), (CaseOptions(context=8), "context")]
)
def test_options_it_does_not_take_are_errors(tmp_path: Path, options: CaseOptions, name: str) -> None:
    with pytest.raises(OptionError, match=f"takes no {name}"):
        build_factory(f"{write(tmp_path / 'net.py', PLAIN)}:make", options)


def test_a_dtype_it_does_not_take_is_applied(tmp_path: Path) -> None:
    body = """
    class Pick(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)
        def forward(self, ids, scale):
            return self.table(ids) * scale

    def make():
        return Pick(), (torch.zeros(2, 3, dtype=torch.long), torch.randn(4))
    """
    file = write(tmp_path / "net.py", body)
    case = build_factory(f"{file}:make", CaseOptions(dtype="bfloat16"))
    assert case.dtype == "bfloat16" and case.module.table.weight.dtype == torch.bfloat16
    assert [tensor.dtype for tensor in case.args] == [torch.int64, torch.bfloat16]
    assert capture(f"{file}:make", dtype="int8").dtype == "int8"
    with pytest.raises(OptionError, match="do not compute in it"):
        build_factory(f"{file}:make", CaseOptions(dtype="int8"))


def test_what_cannot_be_built_on_meta_is_built_on_the_cpu(tmp_path: Path) -> None:
    body = """
    def make():
        width = int(torch.tensor([8]).item())
        return nn.Linear(width, 16), torch.randn(4, width)
    """
    file = write(tmp_path / "net.py", body)
    with pytest.warns(UserWarning, match="cannot be built on the meta device"):
        case = build_factory(f"{file}:make", CaseOptions())
    assert case.args[0].device.type == next(case.module.parameters()).device.type == "cpu"
    with pytest.warns(UserWarning):
        assert capture(f"{file}:make").matmul_flops == 2 * 4 * 8 * 16


def test_a_module_that_chose_the_cpu_stays_there_with_its_inputs(tmp_path: Path) -> None:
    file = write(tmp_path / "net.py", "def make():\n    return nn.Linear(8, 16, device='cpu'), torch.randn(4, 8)\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case = build_factory(f"{file}:make", CaseOptions())
    assert case.args[0].device.type == next(case.module.parameters()).device.type == "cpu"


def test_real_inputs_follow_a_meta_module(tmp_path: Path) -> None:
    file = write(tmp_path / "net.py", "def make():\n    return nn.Linear(8, 16), torch.randn(4, 8, device='cpu')\n")
    assert build_factory(f"{file}:make", CaseOptions()).args[0].is_meta


def test_neighbours_are_importable_and_not_mixed_up(tmp_path: Path) -> None:
    """Two folders with a `parts.py` each: every factory gets its own, and sys.path is as before."""
    before = list(sys.path)
    for name, width in (("a", 3), ("b", 5)):
        write(tmp_path / name / "parts.py", f"WIDTH = {width}\n")
        write(tmp_path / name / "net.py", "from parts import WIDTH\ndef make():\n    return nn.Linear(WIDTH, 1), torch.randn(1, WIDTH)\n")
    specs = [f"{tmp_path / name / 'net.py'}:make" for name in ("a", "b", "a")]
    assert [build_factory(spec, CaseOptions()).module.in_features for spec in specs] == [3, 5, 3]
    assert sys.path == before


def test_classes_of_the_file_can_be_found_again(tmp_path: Path) -> None:
    """torch.compile looks modules up by name, long after the file has run."""
    body = """
    import dataclasses

    @dataclasses.dataclass
    class Sizes:
        width: "int" = 8

    class Net(nn.Linear):
        pass

    def make():
        return Net(Sizes().width, 16), torch.randn(4, 8)
    """
    case = build_factory(f"{write(tmp_path / 'net.py', body)}:make", CaseOptions())
    assert sys.modules[type(case.module).__module__].Net is type(case.module)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        capture(f"{tmp_path / 'absent.py'}:make")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ModelFileError, match="folder"):
        capture(f"{tmp_path / 'folder.py'}:make")


def test_missing_function_shows_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path / "net.py", PLAIN)
    with pytest.raises(UnknownNameError, match="did you mean make"):
        capture(f"{file}:makes")
    with pytest.raises(UnknownNameError, match="defines no function"):
        capture(f"{write(tmp_path / 'empty.py', '')}:make")


def test_what_cannot_be_called_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a int"):
        capture(f"{write(tmp_path / 'net.py', 'make = 3')}:make")


FAILURES = {
    "raise ValueError('no such width\\nsecond line')": r"ValueError: no such width \(line 4\)",
    "raise SystemExit(3)": r"SystemExit: 3 \(line 4\)",
    "raise KeyError": r"KeyError: no message \(line 4\)",
}


@pytest.mark.parametrize("line", FAILURES)
def test_a_factory_that_raises(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "net.py", f"def make():\n    {line}\n")
    with pytest.raises(CaptureError, match=FAILURES[line]) as caught:
        capture(f"{file}:make")
    assert "second line" not in str(caught.value)


@pytest.mark.parametrize("body", ["import no_such_module", "def make(:\n", "raise SystemExit", "1 / 0"])
def test_a_file_that_cannot_be_imported(tmp_path: Path, body: str) -> None:
    before = set(sys.modules)
    with pytest.raises(CaptureError, match=r"net\.py cannot be imported"):
        capture(f"{write(tmp_path / 'net.py', body)}:make")
    assert not [name for name in set(sys.modules) - before if name.startswith("ridgeline_factory")]


def test_errors_of_ours_pass_through(tmp_path: Path) -> None:
    body = """
    from ridgeline.core.errors import OptionError

    def make(batch=1):
        raise OptionError("batch", why="too odd", do="give an even one")
    """
    with pytest.raises(OptionError, match="too odd"):
        capture(f"{write(tmp_path / 'net.py', body)}:make", batch=3)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("nn.Linear(8, 16)", "returned Linear"),
        ("None", "returned NoneType"),
        ("(nn.Linear(8, 16), 3)", r"returned \(Linear, int\)"),
        ("(torch.randn(2), nn.Linear(8, 16))", r"returned \(Tensor, Linear\)"),
        ("(nn.Linear(8, 16), torch.randn(4, 8), 1)", r"returned \(Linear, Tensor, int\)"),
    ],
)
def test_wrong_returns_say_what_came_back(tmp_path: Path, result: str, shown: str) -> None:
    file = write(tmp_path / "net.py", f"def make():\n    return {result}\n")
    with pytest.raises(CaptureError, match=shown):
        capture(f"{file}:make")


def test_inputs_that_do_not_fit_are_a_capture_error(tmp_path: Path) -> None:
    file = write(tmp_path / "net.py", "def make():\n    return nn.Linear(8, 16), torch.randn(4, 9)\n")
    with pytest.raises(CaptureError):
        capture(f"{file}:make")
