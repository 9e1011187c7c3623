"""The snippets of docs/search.md and docs/supernet.md run, one after another, and the pages name what exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL, ROOT

PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("search.md", "supernet.md")]
PAGE = "\n".join(PAGES)


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that train on digits only in a full run, for their time; else they are only compiled."""
    from ridgeline.search.spaces import ops

    monkeypatch.setattr(ops, "_OPS", dict(ops._OPS))  # the page registers an op
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    for page in PAGES:  # each stands for itself
        blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        for block in blocks:
            compile(block, "page", "exec")
        script = tmp_path / "page.py"
        script.write_text("\n".join(block for block in blocks if FULL or '"digits"' not in block), encoding="utf-8")
        made |= runpy.run_path(str(script))
    difference = (made["after"](made["images"]) - made["before"](made["images"])).abs().max()
    assert difference < 1e-5 and made["costs"].shape == (6, 5) and made["seconds"] > 0
    if FULL:
        assert (tmp_path / "run" / "winner" / "weights.safetensors").is_file()
        assert "of 359 test images" in capsys.readouterr().out


def test_the_page_names_what_exists() -> None:
    from ridgeline.search.differentiable.cycle import CycleSettings
    from ridgeline.search.recipe_file import recipe_names
    from ridgeline.search.spaces import space_names
    from ridgeline.search.strategies import STRATEGIES
    from ridgeline.search.study.objectives import OBJECTIVES
    from ridgeline.search.study.request import BY_GRADIENT
    from ridgeline.search.supernet.network import ESTIMATORS, POLICIES

    for name in (*STRATEGIES, *BY_GRADIENT, *OBJECTIVES, *POLICIES, *ESTIMATORS, *recipe_names()):
        assert f"`{name}`" in PAGE, name
    for name in ("nb201", "darts", "macro", "residual", "transformer"):
        assert f"| `{name}` |" in PAGE and name in space_names()
    one = CycleSettings()
    triggers = (one.round_steps, one.warm_rounds, one.search_rounds, one.optimise_rounds, one.warm_settled, one.optimise_settled)
    assert triggers == (50, 2, 3, 4, 0.05, 0.01), "the page's table of phases"
    assert (one.free_ops, one.head_start) == (2, 0.5), "the page's table of phases"


def test_the_page_is_right_about_options_and_blocks() -> None:
    import typer

    from ridgeline.cli.main import app
    from ridgeline.search.spaces import load_space

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    of = {"search": commands["search"], **{f"lut {name}": one for name, one in commands["lut"].commands.items()}}
    lines = re.findall(r"^    ridgeline (search|lut \w+)(.*?)(?:\s# .*)?$", PAGE, re.MULTILINE)
    assert len(lines) >= 12
    for command, rest in lines:
        known = {option for one in of[command].params for option in one.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known, (command, rest)
    for name, count in (
        ("nb201", "25 blocks of"),
        ("darts", "51 of"),
        ("transformer", "50 of"),
        ("residual", "257 of"),
        ("macro", "2,353 of"),
    ):
        assert f"{count} `{name}`" in PAGE and len(load_space(name).all_blocks()) == int(count.split()[0].replace(",", ""))
