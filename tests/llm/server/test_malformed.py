"""Requests drawn from the server's own OpenAPI schema, right and wrong: never a 5xx, never a word about this machine.

/openapi.json ──strategy──> bodies that fit ──mutate──> bodies that almost fit ──+ bytes that are no JSON──> answers < 500
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.llm.server.fake import FakeEngine
from tests.llm.server.live import Live, live, until
from tests.support import ROOT, full_or_tenth

ROUTES = ("/v1/completions", "/v1/chat/completions")
TOLD = re.compile(
    rf"{ROOT}|/hom[e]/|/usr/|/tmp/|site-packages|Traceback|0x[0-9a-f]{{6,}}|\.py\b|pydantic|fastapi|ridgeline\.|models/fake|127\.0\.0\.1"
)
TEXT = st.text(max_size=30)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def from_schema(schema: dict[str, Any], known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a JSON schema of the kind pydantic writes."""
    if "$ref" in schema:
        return from_schema(known[schema["$ref"].rsplit("/", 1)[1]], known)
    if "anyOf" in schema:
        return st.one_of([from_schema(one, known) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema["type"]
    if kind == "object":
        needed = set(schema.get("required", ()))
        fields = {name: from_schema(one, known) for name, one in schema["properties"].items()}
        required = {name: one for name, one in fields.items() if name in needed}
        return st.fixed_dictionaries(required, optional={name: one for name, one in fields.items() if name not in needed})
    if kind == "array":
        return st.lists(from_schema(schema["items"], known), min_size=schema.get("minItems", 0), max_size=min(schema.get("maxItems", 4), 4))
    if kind == "string":
        return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 40), 40))
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum", schema.get("exclusiveMaximum"))
        if kind == "integer":
            return st.integers(low, high) | st.integers(low, min(high, 40) if high is not None else 40)
        return st.floats(low, high, exclude_min="exclusiveMinimum" in schema, exclude_max="exclusiveMaximum" in schema)
    return {"null": st.none(), "boolean": st.booleans()}[kind]


@st.composite
def mutated(draw: st.DrawFn, bodies: st.SearchStrategy[dict[str, Any]]) -> bytes:
    """A body that fits, with one thing wrong; or no JSON at all."""
    body = draw(bodies)
    how = draw(st.sampled_from(["value", "extra", "drop", "cut", "flip", "bytes", "repeat"]))
    if how == "value" and body:
        body[draw(st.sampled_from(sorted(body)))] = draw(JUNK)
    elif how == "extra":
        body[draw(TEXT)] = draw(JUNK)
    elif how == "drop" and body:
        del body[draw(st.sampled_from(sorted(body)))]
    data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if how == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if how == "flip" and data:
        place = draw(st.integers(0, len(data) - 1))
        return data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
    return {"bytes": draw(st.binary(max_size=100)), "repeat": data + data}.get(how, data)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(slots=16), slots=16) as running:
        yield running
        assert running.http.get("/health").status_code == 200
        until(lambda: running.worker._engine.idle)


@pytest.fixture(scope="module")
def bodies(server: Live) -> dict[str, st.SearchStrategy[Any]]:
    page = server.http.get("/openapi.json").json()
    known = page["components"]["schemas"]
    assert "422" not in json.dumps(page["paths"])
    return {
        route: from_schema(page["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"], known) for route in ROUTES
    }


def check(status: int, text: str, right: bool) -> None:
    # right bodies may still ask for more than there is: another model, more tokens than the context holds
    assert status in ((200, 400, 404) if right else (200, 400, 404, 413)), (status, text)
    if status != 200:
        assert not TOLD.search(text), text
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


SETTINGS = settings(
    max_examples=full_or_tenth(500), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


@pytest.mark.parametrize("route", ROUTES)
def test_what_the_schema_allows_is_never_a_server_error(route: str, server: Live, bodies: dict[str, st.SearchStrategy[Any]]) -> None:
    codes = set()

    @SETTINGS
    @given(bodies[route])
    def run(body: dict[str, Any]) -> None:
        answer = server.http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
        codes.add(answer.status_code)
        check(answer.status_code, answer.text, True)
        # the model's own name makes it a request that is carried out
        if answer.status_code == 404:
            again = server.http.post(route, content=json.dumps({**body, "model": "fake"}), headers={"content-type": "application/json"})
            codes.add(again.status_code)
            check(again.status_code, again.text, True)

    run()
    assert 200 in codes


@pytest.mark.parametrize("route", ROUTES)
def test_what_it_does_not_allow_is_a_client_error(route: str, server: Live, bodies: dict[str, st.SearchStrategy[Any]]) -> None:
    codes = set()

    @SETTINGS
    @given(mutated(bodies[route]), st.sampled_from(["application/json", "application/json; charset=utf-8", "text/plain", ""]))
    def run(body: bytes, kind: str) -> None:
        answer = server.http.post(route, content=body, headers={"content-type": kind})
        codes.add(answer.status_code)
        check(answer.status_code, answer.text, False)

    run()
    assert 400 in codes
