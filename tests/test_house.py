"""The house rules, held by tests: who may import whom, how long things may be, what is never used, how fast it starts.

    src/ridgeline/**/*.py ──ast──> imports_from_below, too_long, forbidden, undocumented ──> []
    pyproject, constraints, Makefile, .ci/run, README ──text──> the same commands everywhere

Each checker is also run on a planted violation, so that a checker that sees nothing fails.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import urlparse

import pytest

import ridgeline
from tests.support import ROOT

PACKAGE = "ridgeline"
SOURCE = ROOT / "src" / PACKAGE
ROOMS = ("core", "workload", "target", "estimate", "measure", "kernel", "train", "transform", "crossbar", "llm", "search", "report", "cli")
FILE_LINES, FUNCTION_LINES, DOCSTRING_LINES = 500, 80, 20
START_S = 0.5
INSTALL = "pip install -c constraints.txt -e '.[dev]'"
TEST = "python -m pytest"

MODULES = {str(path.relative_to(SOURCE.parent)): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def room_of(module: str) -> str | None:
    """`ridgeline.target.load` → `target`; the package itself and other people's modules → None."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def imported_modules(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import, relative ones resolved; public names count as the module they live in."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            if module != PACKAGE:
                yield node.lineno, module
                continue
            for alias in node.names:
                yield node.lineno, PACKAGE + ridgeline._HOMES.get(alias.name, f".{alias.name}")


def imports_from_below(path: str, text: str) -> list[str]:
    """Imports in `path` of rooms that come after its own; a file that stands in no room is wrong in itself."""
    room = room_of(path.removesuffix(".py").replace("/", "."))
    if path in (f"{PACKAGE}/__init__.py", f"{PACKAGE}/__main__.py"):
        return []
    if room not in ROOMS:
        return [f"{path}: {room} is not a room"]
    above = ROOMS[: ROOMS.index(room) + 1]
    found = ((line, module, room_of(module)) for line, module in imported_modules(path, ast.parse(text)))
    return [f"{path}:{line}: imports {module}" for line, module, other in found if other in ROOMS and other not in above]


def test_imports_point_upstream() -> None:
    assert [wrong for path, text in MODULES.items() for wrong in imports_from_below(path, text)] == []


def test_core_imports_no_other_room() -> None:
    assert any(path.startswith(f"{PACKAGE}/core/") for path in MODULES)
    for path, text in MODULES.items():
        if path.startswith(f"{PACKAGE}/core/"):
            assert {room_of(module) for _, module in imported_modules(path, ast.parse(text))} <= {None, "core"}, path


@pytest.mark.parametrize(
    "line",
    [
        "from ..report.table import render",
        "from ...ridgeline.report import table",
        "from .. import report",
        "from .. import advise",
        "import ridgeline.report.table as t",
        "from ridgeline.report import table",
        "from ridgeline import report",
        "from ridgeline import measure",
        "def late():\n    from ..cli import main",
        "if TYPE_CHECKING:\n    from ..estimate.processor import Settings",
    ],
)
def test_planted_import_from_below_is_caught(line: str) -> None:
    assert len(imports_from_below("ridgeline/target/load.py", line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "from .spec import Spec",
        "from . import spec",
        "from ..core.errors import nearest",
        "import ridgeline.workload.graph",
        "import report.cli",
    ],
)
def test_imports_from_above_are_allowed(line: str) -> None:
    assert imports_from_below("ridgeline/target/load.py", line) == []


def test_planted_file_outside_every_room_is_caught() -> None:
    assert imports_from_below("ridgeline/utils/misc.py", "") and imports_from_below("ridgeline/helpers.py", "")


def too_long(path: str, text: str) -> list[str]:
    found = [f"{path}: {lines} lines"] if (lines := len(text.splitlines())) > FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            found += [f"{path}: {node.name}() is {length} lines"] if length > FUNCTION_LINES else []
    return found


def undocumented(path: str, text: str) -> list[str]:
    return [path] if len(text.splitlines()) > DOCSTRING_LINES and not ast.get_docstring(ast.parse(text)) else []


def test_files_and_functions_are_short() -> None:
    assert [wrong for path, text in MODULES.items() for wrong in too_long(path, text)] == []


def test_modules_say_what_they_do() -> None:
    assert [wrong for path, text in MODULES.items() for wrong in undocumented(path, text)] == []


def test_planted_length_and_silence_are_caught() -> None:
    assert too_long("a.py", "x = 1\n" * FILE_LINES) == []
    assert too_long("a.py", "x = 1\n" * (FILE_LINES + 1)) == ["a.py: 501 lines"]
    assert too_long("a.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1)) == []
    assert too_long("a.py", "class A:\n  async def f(self):\n" + "    x = 1\n" * FUNCTION_LINES) == ["a.py: f() is 81 lines"]
    assert undocumented("a.py", '"""Says so."""\n' + "x = 1\n" * DOCSTRING_LINES) == []
    assert undocumented("a.py", "x = 1\n" * (DOCSTRING_LINES + 1)) == ["a.py"]


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_ATTRIBUTES = {"os.system", "os.popen"}
UNSAFE_KEYWORDS = {("shell", True), ("weights_only", False), ("allow_pickle", True), ("trust_remote_code", True)}


def forbidden(path: str, text: str) -> list[str]:
    """Ways to run code that came as data: unpicklers, eval and exec, shells."""
    tree = ast.parse(text)
    found = [f"{path}:{line}: imports {name}" for line, name in imported_modules(path, tree) if name.split(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        unsafe = [called] if called in UNSAFE_CALLS | UNSAFE_ATTRIBUTES else []
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in UNSAFE_KEYWORDS:
                unsafe.append(ast.unparse(keyword))
        found += [f"{path}:{node.lineno}: {what}" for what in unsafe]
    return found


def test_nothing_runs_code_that_came_as_data() -> None:
    assert [wrong for path, text in MODULES.items() for wrong in forbidden(path, text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "eval('1')",
        "exec('x = 1')",
        "subprocess.run('ls', shell=True)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "os.system('ls')",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_planted_unsafe_line_is_caught(line: str) -> None:
    assert len(forbidden("ridgeline/core/files.py", line)) == 1


def test_look_alikes_are_allowed() -> None:
    assert (
        forbidden("ridgeline/core/files.py", "model.eval()\nloader.exec_module(m)\ntorch.load(p, weights_only=True)\nrun(c, shell=False)")
        == []
    )


HELP = "import sys; sys.argv = ['ridgeline', '--help']; from ridgeline.cli.main import main; main()"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def best_of_five_s(code: str) -> float:
    """The quickest of five fresh interpreters: noise only ever adds."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert run_python(code).returncode == 0
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("code", ["import ridgeline", HELP], ids=["import", "help"])
def test_starts_quickly(code: str) -> None:
    assert best_of_five_s(code) < START_S


def test_help_lists_the_commands() -> None:
    result = run_python(HELP)
    assert result.returncode == 0, result.stderr
    assert {"analyze", "profile", "compare", "targets", "models", "calibrate", "env"} <= set(re.findall(r"\w+", result.stdout))


@pytest.mark.parametrize("code", ["import ridgeline", f"try:\n    {HELP}\nexcept SystemExit:\n    pass"], ids=["import", "help"])
def test_start_leaves_heavy_libraries_unimported(code: str) -> None:
    heavy = ("torch", "numpy", "transformers", "onnx", "onnxruntime", "triton")
    result = run_python(f"{code}\nimport sys\nprint([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)")
    assert result.stderr.strip() == "[]"


def test_import_ridgeline_imports_only_itself() -> None:
    result = run_python("import ridgeline, sys\nprint(sorted(name for name in sys.modules if name.startswith('ridgeline')))")
    assert result.stdout.strip() == "['ridgeline']"


def test_public_names_resolve() -> None:
    assert set(ridgeline.__all__) == {*ridgeline._HOMES, "__version__"}
    assert len(ridgeline.__all__) < 40
    assert set(ridgeline.__all__) <= set(dir(ridgeline))
    for name, home in ridgeline._HOMES.items():
        assert getattr(ridgeline, name).__module__ == PACKAGE + home.partition(":")[0], name


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ridgeline.no_such_name


FUNCTION = "import types; import ridgeline; assert type(ridgeline.{room}) is types.FunctionType; from ridgeline import {room} as public; "
SAME = "from ridgeline.{room}.{module} import {room} as private; assert public is private is ridgeline.{room}; "


FORMS = [
    FUNCTION + SAME,
    "import ridgeline.{room}.{module}; " + FUNCTION + SAME,
    "import ridgeline.{room}.{sibling}; " + FUNCTION + SAME,
    "import ridgeline.{room}; " + FUNCTION + SAME,
    FUNCTION + "import ridgeline.{room}.{module}; " + FUNCTION + SAME,
    "from ridgeline.{room}.{module} import {room}; " + FUNCTION + SAME,
    "import ridgeline.{room}.{module} as m; assert m.__name__ == 'ridgeline.{room}.{module}'; " + FUNCTION + SAME,
    FUNCTION + "import ridgeline.{room}.{sibling} as m; assert m.__name__ == 'ridgeline.{room}.{sibling}'",
    FUNCTION + "import ridgeline.{room}.{module}; assert ridgeline.{room}.{module}.{room} is public",
    FUNCTION + "from ridgeline.{room} import {sibling} as m; assert m.__name__ == 'ridgeline.{room}.{sibling}'",
    "p = dict(__package__='ridgeline.cli'); f = __import__('{room}.{sibling}', p, None, ['x'], 2); "
    "assert f.__name__ == 'ridgeline.{room}.{sibling}'; " + FUNCTION + SAME,
    "import importlib; m = importlib.import_module('ridgeline.{room}.{sibling}'); assert m.__package__ == 'ridgeline.{room}'; " + FUNCTION,
    "import ridgeline.{room}.{module}; from unittest.mock import patch\n"
    "with patch('ridgeline.{room}.{module}.{room}', 3): assert ridgeline.{room} == 3\n" + FUNCTION + SAME,
]


# Every form on the room that imports quickly; on the one that imports torch, the two orders that matter.
@pytest.mark.parametrize(
    ("code", "room", "module", "sibling"),
    [(form, "estimate", "processor", "advice") for form in FORMS] + [(form, "measure", "profiler", "regions") for form in FORMS[:2]],
)
def test_a_function_and_a_room_share_a_name(code: str, room: str, module: str, sibling: str) -> None:
    result = run_python(code.format(room=room, module=module, sibling=sibling))
    assert result.returncode == 0, result.stderr


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirement_name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_constraints_pin_every_dependency() -> None:
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pinned = [requirement_name(line) for line in lines]
    assert len(pinned) == len(set(pinned))
    project = tomllib.loads(read("pyproject.toml"))["project"]
    needed = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    assert {requirement_name(r) for r in needed} - {PACKAGE} - set(pinned) == set()


def test_every_pip_install_reads_the_constraints() -> None:
    for name in ("Makefile", ".ci/run"):
        installs = [line for line in read(name).splitlines() if "pip install" in line]
        assert installs, name
        assert [line for line in installs if "pip install -c constraints.txt " not in line] == [], name


@pytest.mark.parametrize("command", [INSTALL, TEST, "ruff check .", "ruff format --check .", "mypy"])
def test_makefile_and_ci_run_the_same_commands(command: str) -> None:
    assert command in read("Makefile")
    assert command in read(".ci/run")


def test_readme_gives_the_commands_that_ci_runs() -> None:
    commands = [line.strip().removeprefix("$ ") for line in read("README.md").splitlines()]
    for command in (INSTALL, TEST):
        assert any(line.split("#")[0].strip() in (command, f".venv/bin/{command}") for line in commands), command


def test_ci_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_layout_page_draws_the_rooms_in_order() -> None:
    page = read("docs/layout.md")
    rooms = [room for room in ROOMS if (SOURCE / room).is_dir()]
    assert re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE) == rooms


@pytest.mark.parametrize("page", ["docs/layout.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_paths_in_the_pages_exist(page: str) -> None:
    named = re.findall(r"`((?:src|tests|docs|\.ci)/[\w./-]*)`", read(page))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {ridgeline.__version__}\n" in read("CITATION.cff")


MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:root|work|home)(?:/|\b)")
INDEX_OPTION = re.compile(r"(?:index[-_]url|find[-_]links|trusted[-_]host)\b", re.IGNORECASE)
PUBLIC_HOSTS = {"pypi.org", "files.pythonhosted.org"}


def tracked_texts() -> Iterator[tuple[str, str]]:
    """(path, text) of each file git tracks or would add; binary files are left out."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            try:
                yield name, read(name)
            except UnicodeDecodeError:
                continue


def configured_hosts() -> set[str]:
    """Hosts pip is told to use on this machine, whatever they are: none belongs in the repository."""
    settings = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    urls = re.findall(r"\w+://[^\s'\"]+", settings)
    return {host for url in urls if (host := urlparse(url).hostname)} - PUBLIC_HOSTS


def machine_traces(text: str, hosts: set[str]) -> list[str]:
    return [match[0] for pattern in (MACHINE_PATH, INDEX_OPTION) for match in pattern.finditer(text)] + [h for h in hosts if h in text]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so there is no list of tracked files")
def test_no_file_names_a_machine_or_a_registry() -> None:
    hosts = configured_hosts()
    texts = dict(tracked_texts())
    assert "pyproject.toml" in texts
    assert {name: traces for name, text in texts.items() if (traces := machine_traces(text, hosts))} == {}


def test_planted_traces_are_caught() -> None:
    slash, dash = "/", "-"
    for planted in (
        f"cd {slash}root",
        f"'{slash}work{slash}x'",
        f"={slash}home{slash}me",
        f"--index{dash}url x",
        f"find{dash}links",
        "see mirror.test",
    ):
        assert machine_traces(planted, {"mirror.test"}), planted
    assert machine_traces("the tree's /rooting, src/work/x.py, ../work/x, docs/home/, ~/home/", {"mirror.test"}) == []
