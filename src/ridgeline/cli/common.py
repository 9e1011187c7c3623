"""What every command shares: options, progress on stderr, results on stdout or in files.

    command ──parse──> check_outputs ──> API call ──> emit(profile): table or JSON on stdout, HTML and trace into files

JSON owns stdout when asked for; everything else a command says goes to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..core.profile import Profile

Model = Annotated[str, typer.Argument(help="A name from `ridgeline models`, model.onnx, a Hugging Face folder, or file.py:factory.")]
On = Annotated[str, typer.Option("--on", help="A name from `ridgeline targets list`, `cpu`, `cuda`, or a path to a .toml file.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Samples in one pass.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16, int8, … (default: the model's own).")]
Phase = Annotated[str | None, typer.Option("--phase", help="prefill or decode, for language models.")]
Context = Annotated[int | None, typer.Option("--context", help="Tokens: the prompt in prefill, all positions attended in decode.")]
Mode = Annotated[str, typer.Option("--mode", help="eager, or fused as a compiler would.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a self-contained HTML report here.")]
Trace = Annotated[Path | None, typer.Option("--trace", help="Write a Chrome/Perfetto trace here.")]
Rows = Annotated[int, typer.Option("--rows", min=0, help="Ops shown in the table, heaviest first (0: all).")]


QUIET_S = 10.0


def check_outputs(*files: Path | None) -> None:
    """Before the work whose results go there; a folder that is to be written is given as a file in it."""
    from ..core.files import check_writable

    for file in files:
        if file is not None:
            check_writable(file)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on: live on a terminal, one line a stage elsewhere."""
    if not sys.stderr.isatty():
        yield spoken(what)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(what)) as status:
        yield lambda message: status.update(escape(f"{what}: {message}"))


def spoken(what: str) -> Callable[[str], None]:
    """Without a terminal: what begins, then a line every ten seconds."""
    said = [time.monotonic()]
    sys.stderr.write(f"{what} …\n")

    def report(message: str) -> None:
        if time.monotonic() - said[0] >= QUIET_S:
            said[0] = time.monotonic()
            sys.stderr.write(f"  {message}\n")

    return report


def emit(profile: Profile, *, as_json: bool, html: Path | None, trace: Path | None, rows: int, extra: dict[str, Any] | None = None) -> None:
    """Show a profile in every form that was asked for; files are written whole or not at all."""
    from ..core.files import write_json, write_text

    if html:
        write_text(html, profile.to_html())
        say(f"report: {html}")
    if trace:
        write_json(trace, profile.to_trace())
        say(f"trace: {trace}")
    if as_json:
        emit_json({**profile.to_json(), **(extra or {})})
    else:
        sys.stdout.write(profile.table(limit=rows or None, color=sys.stdout.isatty()) + "\n")


def emit_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")


def say(message: str) -> None:
    sys.stderr.write(message + "\n")
