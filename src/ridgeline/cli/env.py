"""`ridgeline env`: what this machine is and what can be measured on it, for bug reports."""

from __future__ import annotations

import sys

from .common import Json, emit_json


def env(as_json: Json = False) -> None:
    """What this machine is, and what can be measured on it."""
    from ..measure.environment import environment
    from ..report.catalog import render_facts

    facts = environment()
    if as_json:
        emit_json(facts)
    else:
        sys.stdout.write(render_facts(facts) + "\n")
