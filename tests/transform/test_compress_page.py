"""The page on compression runs as it is printed, and knows every kind of step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.transform.advised import ADVISED
from ridgeline.transform.recipe import load_recipe, recipe_names
from ridgeline.transform.step import HOMES
from tests.support import ROOT

PAGE = (ROOT / "docs" / "compress.md").read_text(encoding="utf-8")


def test_snippets_run(tmp_path: Path) -> None:
    for needed in ("sklearn", "onnx", "onnxruntime"):
        pytest.importorskip(needed)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    (tmp_path / "page.py").write_text(code)
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "smaller" in done.stdout and (tmp_path / "small.onnx").is_file()


def test_recipe_on_the_page_is_valid(tmp_path: Path) -> None:
    text = re.search(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert text is not None
    (tmp_path / "r.toml").write_text(text[1])
    assert [one.kind for one in load_recipe(tmp_path / "r.toml").steps] == ["prune", "distill", "quantize"]


def test_page_names_every_step_recipe_and_advice() -> None:
    for kind in HOMES:
        assert f"| `{kind}` |" in PAGE, kind
    for name in (*recipe_names(), *ADVISED):
        assert f"`{name}`" in PAGE, name
