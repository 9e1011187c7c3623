"""Where a file is going to be written is looked at before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.core.files import check_writable


def test_a_place_for_a_file_is_told_from_one_that_is_none(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "file.json")
    assert not list((tmp_path / "new").iterdir())  # nothing is left behind
    (tmp_path / "file").write_text("kept")
    check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    for wrong, told in ((tmp_path, "is a folder"), (tmp_path / "file" / "below", "exists"), (tmp_path / ("n" * 300), "too long")):
        with pytest.raises(OptionError, match=told):
            check_writable(wrong)
