"""The run folder: taken up by its own request only; files that are none of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.search.study.evaluate import quiet
from ridgeline.search.study.folder import open_run, read_front, read_run, read_trials


def test_a_folder_goes_on_with_its_own_request_only(tmp_path: Path) -> None:
    said: list[str] = []
    with open_run(tmp_path, {"seed": 1, "space": ("a",)}, say=said.append) as run:
        run.journal.append({"kind": "trial"})
    with open_run(tmp_path, {"seed": 1, "space": ["a"]}, say=said.append) as run:
        assert len(run.journal.entries) == 1
    with pytest.raises(OptionError, match="seed was 1, now 2"), open_run(tmp_path, {"seed": 2, "space": ["a"]}, say=quiet):
        pass
    with pytest.raises(OptionError, match="holds a run already"), open_run(tmp_path, {"seed": 1, "space": ["a"]}, resume=False, say=quiet):
        pass
    assert not said
    document = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    (tmp_path / "run.json").write_text(json.dumps({**document, "versions": {"torch": "0"}}), encoding="utf-8")
    with open_run(tmp_path, {"seed": 1, "space": ["a"]}, say=said.append):
        assert "other versions" in said[0]
    (tmp_path / "run.json").unlink()
    with pytest.raises(OptionError, match=r"without run\.json"), open_run(tmp_path, {"seed": 1}, say=quiet):
        pass


def test_hostile_folders(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"schema": 2}', '{"schema": 1, "request": 3}', "[" * 100_000):
        (tmp_path / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(OptionError):
            read_run(tmp_path)
    with pytest.raises(OptionError):
        read_front(tmp_path / "none")
    assert read_trials(tmp_path / "none") == []
