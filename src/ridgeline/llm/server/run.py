"""Start, drain, stop.

    serve(engine, options, host, port) ──> uvicorn with our protocol and Gate, until a signal
      SIGTERM, SIGINT   nothing new (503, Retry-After); what runs may finish within drain_seconds; then it is cancelled
      a second signal   stops now

Binding anything but loopback without keys is refused before the port is opened.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from types import FrameType
from typing import Any

from ...core.errors import MissingExtraError, OptionError
from .app import ServerOptions, Service, create_app
from .auth import check_binding
from .worker import ServedEngine

try:
    import uvicorn

    from .protocol import timed_protocol
except ImportError as error:
    raise MissingExtraError("the server cannot start", why="uvicorn is not installed", do="pip install 'ridgeline[serve]'") from error

CLOSING_S = 5
KEEP_ALIVE_S = 15
logger = logging.getLogger("ridgeline.server")


class DrainingServer(uvicorn.Server):
    """uvicorn's server, except that a signal drains before it stops."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = service, drain_s
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until is None:
            logger.warning("draining: no new requests, at most %g s for those that run", self._drain_s)
            self._service.worker.draining = True
            self._drain_until = time.monotonic() + self._drain_s
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until is not None and (not self._service.worker.busy or time.monotonic() >= self._drain_until):
            self.should_exit = True
        if self.should_exit:
            self._service.worker.draining = True
            self._service.worker.cancel_all()
        return await super().on_tick(counter)


def build(engine: ServedEngine, options: ServerOptions, host: str, port: int) -> DrainingServer:
    """The server, not yet running."""
    served = create_app(engine, options)
    config = uvicorn.Config(
        served.asgi,
        host=host,
        port=port,
        http=timed_protocol(options.limits),
        ws="none",
        loop="asyncio",
        lifespan="on",
        h11_max_incomplete_event_size=options.limits.header_bytes,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
        server_header=False,
        proxy_headers=False,
        access_log=False,
        log_level="warning",
    )
    return DrainingServer(config, served.service, options.limits.drain_seconds)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that says why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise OptionError(f"cannot listen on {host}:{port}", why=str(error), do="choose another --host or --port") from error
    return listener


def serve(engine: ServedEngine, options: ServerOptions, host: str = "127.0.0.1", port: int = 8000, *, insecure: bool = False) -> None:
    """Serve until a signal; returns when everything is drained."""
    check_binding(host, options.keys, insecure)
    listener = listen(host, port)
    server = build(engine, options, host, port)
    address = f"[{host}]" if ":" in host else host
    logger.warning("serving %s on http://%s:%d/v1", server._service.name, address, listener.getsockname()[1])
    server.run(sockets=[listener])


def log_line(entry: dict[str, Any], as_json: bool) -> None:
    """One request of the access log, on stderr: no key, no prompt, no text."""
    if as_json:
        sys.stderr.write(json.dumps(entry) + "\n")
    else:
        tokens = f" {entry['prompt_tokens']}+{entry['completion_tokens']} tokens" if "prompt_tokens" in entry else ""
        sys.stderr.write(f"{entry['method']} {entry['route']} {entry['code']} {entry['seconds'] * 1e3:.0f} ms{tokens}\n")
