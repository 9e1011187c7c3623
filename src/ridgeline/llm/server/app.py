"""The routes.

    POST /v1/completions, /v1/chat/completions ──> prepare ──> worker.open ──> stream | whole
    GET  /v1/models, /v1/models/{id}               what is served
    GET  /health    200 ok, 503 draining or dead   the one route without a key
    GET  /metrics   Prometheus                     GET /openapi.json   this, as a schema

`create_app` puts the app inside its Gate: authentication, limits and error forms hold for every route there is or will be.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ... import __version__
from .answers import ChatStyle, CompletionStyle, Style, usage_of
from .auth import ApiKeys
from .errors import ApiError, internal, invalid
from .gate import HUNG_UP, Gate
from .limits import Limits
from .metrics import CONTENT_TYPE, Metrics
from .prepare import Prepared, Preparer
from .schemas import Asked, ChatRequest, CompletionRequest
from .stream import EventStream, HungUp, collect, pieces
from .worker import ServedEngine, Worker

REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "Wrong, refused, too large, too late (408) or too many (429, see Retry-After); the error object says what."},
    "503": {"description": "Shutting down, or the engine is not running; see Retry-After."},
}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How an engine is served."""

    keys: ApiKeys = field(default_factory=ApiKeys)
    limits: Limits = field(default_factory=Limits)
    slots: int = 64
    """Requests the engine runs at once."""
    name: str | None = None
    """The id clients use; None: the last part of the model's name."""
    local_only: bool = True
    """Bound to loopback: without keys, only the names of this machine are answered."""
    log: Callable[[dict[str, Any]], None] | None = None


class Service:
    """What the routes share."""

    def __init__(self, engine: ServedEngine, options: ServerOptions) -> None:
        loaded, limits = engine.loaded, options.limits
        # a path is nobody's business: only its last part is shown
        self.name = options.name or PurePath(loaded.name).name or "model"
        self.started = int(time.time())
        self.tokenizer = loaded.tokenizer
        self.metrics = Metrics()
        self.preparer = Preparer(loaded, limits, engine.context)
        # with several keys, one of them can't fill the whole line
        share = 0.5 if options.keys.count > 1 else 1.0
        self.worker = Worker(
            engine,
            slots=options.slots,
            waiting=limits.waiting,
            metrics=self.metrics,
            request_s=limits.request_seconds,
            client_share=share,
        )

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.worker.start()
        yield
        self.worker.cancel_all()
        self.worker.stop()
        self.preparer.close()

    def model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "ridgeline"}

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            raise ApiError(404, "no such model here; GET /v1/models lists what is served", code="model_not_found", param="model")

    async def answer(self, request: Request, asked: Asked, prepared: Prepared, style: Style) -> Response:
        """Generate, and answer as a stream or as a whole."""
        state = request.scope["state"]
        group = await self.worker.open(prepared.choices, state["client"])
        self.metrics.add("prompt_tokens_total", prepared.prompt_tokens)  # of those taken in: a refusal has raised
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            chunks = pieces(group, style, prepared, with_usage, state)
            return EventStream(chunks, lambda: self.worker.close(group), group.deadline)
        try:
            outcomes = await collect(group, prepared, request)
        except HungUp:
            return Response(status_code=HUNG_UP)
        finally:
            self.worker.close(group)
        usage = state["usage"] = usage_of(prepared.prompt_tokens, outcomes)
        return JSONResponse(style.whole(outcomes, usage))


@dataclass(frozen=True, slots=True)
class Served:
    """`asgi` is what a server runs; the rest is there for whoever drains or checks it."""

    asgi: Gate
    service: Service
    app: FastAPI


def create_app(engine: ServedEngine, options: ServerOptions | None = None) -> Served:
    """The application in front of `engine`."""
    options = options or ServerOptions()
    service = Service(engine, options)
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        lifespan=service.lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=REFUSALS,
        separate_input_output_schemas=False,
    )
    _add_routes(app, service)
    _add_errors(app)
    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    gate = Gate(app, options.keys, options.limits, service.metrics, paths=paths, local_only=options.local_only, log=options.log)
    return Served(gate, service, app)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        service.check_model(asked.model)
        service.worker.check_open()
        prepared = await service.preparer.completion(asked)
        return await service.answer(request, asked, prepared, CompletionStyle(service.name, service.tokenizer, asked.logprobs is not None))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        service.check_model(asked.model)
        service.worker.check_open()
        prepared = await service.preparer.chat(asked)
        return await service.answer(request, asked, prepared, ChatStyle(service.name, service.tokenizer, bool(asked.logprobs)))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(service.model())

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        state = service.worker.state
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.render(service.worker.stats), media_type=CONTENT_TYPE)


def _add_errors(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return JSONResponse(error.content(), status_code=error.status, headers=error.headers())

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> Response:
        return answer(invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        known = {404: "no such route", 405: "this route does not take that method", 400: "the body is not valid JSON"}
        return answer(ApiError(error.status_code, known.get(error.status_code, "the request was refused")))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return answer(internal())
