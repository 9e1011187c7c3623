"""A process that renders chat templates, and can do nothing else for long.

    stdin: one JSON object a line {template, variables} ──jinja2, sandboxed──> stdout: one JSON object a line {text} or {error}

A template comes with a model file and is a program: it may loop for ever, or double a string until memory is full. So it runs
here, started as a script by chat.py, under a limit on memory and a clock that ends the process. The variables and functions are those
Hugging Face templates count on. Nothing of Ridgeline is imported, so that the start takes a tenth of a second.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_MEMORY_BYTES = 2**29
MOST_SECONDS = 5
MOST_CHARACTERS = 2**22


class Generation(Extension):
    """{% generation %}…{% endgeneration %} marks what training learns from; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message: str) -> None:
    """What templates call for messages they cannot write."""
    raise TemplateError(str(message))


@lru_cache(maxsize=4)
def compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(template)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """The rendered text, or what went wrong in one line."""
    parts: list[str] = []
    length = 0
    try:
        for part in compiled(request["template"]).generate(**request["variables"]):
            length += len(part)
            if length > MOST_CHARACTERS:
                return {"error": f"it writes more than {MOST_CHARACTERS:,} characters"}
            parts.append(part)
    except MemoryError:
        return {"error": f"it takes more than {MOST_MEMORY_BYTES:,} bytes"}
    except Exception as error:  # a template can raise anything: its own message, a type error, a division by zero
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}" if str(error).strip() else type(error).__name__}
    return {"text": "".join(parts)}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = sys.stdout.buffer
    out.write(b"ready\n")
    out.flush()
    for line in sys.stdin.buffer:
        signal.alarm(2 * MOST_SECONDS)  # ends this process if whoever asked is gone and cannot
        reply = json.dumps(answer(json.loads(line)))
        signal.alarm(0)
        out.write(reply.encode("ascii") + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
