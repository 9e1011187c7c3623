"""What ran in the background: numeric tests by Triton's interpreter, machine-code tests by its compiler, training,
compression, crossbars, models, search.

See conftest.py. A folder named on the command line runs in front as usual.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("group", ["numerics", "compiled", "compress", "models", "search"])
def test_in_a_process_of_their_own(group: str, background: dict[str, Any]) -> None:
    if group not in background:
        pytest.skip("runs in front, or Triton is not installed: pip install 'ridgeline[gpu]'")
    process, log = background[group]
    process.wait(timeout=900)
    log.seek(0)
    output = log.read()
    print(output[-2000:])
    assert process.returncode == 0 and " passed" in output, output[-8000:]
