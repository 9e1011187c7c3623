"""What Triton 3.6, older than the one pinned here, asks of the source of kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if "@jit" in path.read_text())


def early_returns(source: str) -> Iterator[str]:
    """Of @jit functions, each `if` that returns a value and is not the last statement.

    Triton 3.6 compiles what follows as well, whatever the constant in the condition: a second return of another type, or a load
    through a pointer that is None, is an error. An `else` is left out as it should be.
    """
    kernels = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for kernel in (node for node in kernels if any("jit" in ast.unparse(one) for one in node.decorator_list)):
        blocks = [block for node in ast.walk(kernel) for block in (getattr(node, "body", []), getattr(node, "orelse", []))]
        for statement in (one for block in blocks if isinstance(block, list) for one in block[:-1]):
            returns = [node for node in ast.walk(statement) if isinstance(node, ast.Return)]
            if isinstance(statement, ast.If) and any(node.value is not None for node in returns):
                yield f"{kernel.name}, line {statement.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_statement_follows_a_return(path: Path) -> None:
    assert not list(early_returns(path.read_text()))


def test_a_return_amid_a_kernel_is_found() -> None:
    early = "@jit\ndef f(x, P: tl.constexpr):\n    if P:\n        return x\n    return x + 1\n"
    assert list(early_returns(early)) == ["f, line 3"]
    assert not list(early_returns(early.replace("    return x + 1", "    else:\n        return x + 1")))
    assert len(SOURCES) > 20
