"""`ridgeline models`: the models that come by name."""

from __future__ import annotations

import sys

from .common import Json, emit_json


def models(as_json: Json = False) -> None:
    """The models that come by name, with parameters and defaults."""
    from ..report.catalog import render_models
    from ..workload.models import MODELS

    if as_json:
        emit_json([{"name": m.name, "family": m.family, "description": m.description, "parameters": m.parameters, "dtype": m.default_dtype,
                    "context": m.default_context, "phases": list(m.phases)} for m in MODELS.values()])  # fmt: skip
        return
    sys.stdout.write(render_models(list(MODELS.values())) + "\n")
