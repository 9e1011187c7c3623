"""`ridgeline serve [MODEL]`: an OpenAI-compatible server on this machine.

MODEL ──load──> Engine ──> http://127.0.0.1:8000/v1   until Ctrl-C or SIGTERM, then drained
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from .common import progress, say
from .generate import DraftOf, Lookahead, open_engine


def serve(
    model: Annotated[str, typer.Argument(help="builtin, a Hugging Face folder, a .gguf or llama2.c .bin, or NAME:random.")] = "builtin",
    host: Annotated[str, typer.Option("--host", help="Address to bind; anything but loopback needs API keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    on: Annotated[str, typer.Option("--on", help="auto, cpu, cuda or cuda:N.")] = "auto",
    weights: Annotated[str | None, typer.Option("--weights", help="int8 or int4: quantise the weights while loading.")] = None,
    context: Annotated[int | None, typer.Option("--context", min=2, help="Tokens of prompt and output (default: the model's).")] = None,
    kv_int8: Annotated[bool, typer.Option("--kv-int8", help="Keys and values in int8: half the memory.")] = False,
    draft: DraftOf = None,
    lookahead: Lookahead = 4,
    kv_memory_mib: Annotated[int | None, typer.Option("--kv-memory-mib", min=1, help="Memory for keys and values.")] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Requests generated at once.")] = 64,
    max_waiting: Annotated[int, typer.Option("--max-waiting", min=0, help="Requests in line; more are answered 429.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of one answer.")] = 4096,
    max_prompt_tokens: Annotated[int | None, typer.Option("--max-prompt-tokens", min=1, help="(default: the context).")] = None,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", min=1024, help="Larger bodies are answered 413.")] = 1 << 20,
    request_seconds: Annotated[float, typer.Option("--request-seconds", min=0.1, help="A request that takes longer is cancelled.")] = 300.0,
    drain_seconds: Annotated[float, typer.Option("--drain-seconds", min=0.0, help="For running requests after SIGTERM.")] = 30.0,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="One key a line; or set RIDGELINE_API_KEYS.")] = None,
    insecure_no_auth: Annotated[bool, typer.Option("--insecure-no-auth", help="Bind a network address without keys all the same.")] = False,
    name: Annotated[str | None, typer.Option("--name", help="The id clients use (default: the model's).")] = None,
    json_log: Annotated[bool, typer.Option("--json-log", help="The access log as JSON lines.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No access log.")] = False,
) -> None:
    """Serve a model to any OpenAI client, on this machine unless told otherwise."""
    from ..core.errors import MissingExtraError, OptionError
    from ..llm.server.auth import check_binding, is_loopback, load_keys
    from ..llm.server.limits import Limits

    try:
        from ..llm.server.app import ServerOptions
        from ..llm.server.run import log_line
        from ..llm.server.run import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ridgeline"):
            raise
        raise MissingExtraError(
            "the server cannot start", why=f"{error.name} is not installed", do="pip install 'ridgeline[serve]'"
        ) from error
    if weights not in (None, "int8", "int4"):
        raise OptionError(f"--weights {weights}", why="weights are stored as int8 or int4", do="give one of them, or leave it out")
    # who may come in is settled before a model is loaded
    keys = load_keys(api_key_file)
    check_binding(host, keys, insecure_no_auth)
    limits = Limits(
        body_bytes=max_body_bytes, prompt_tokens=max_prompt_tokens, max_tokens=max_tokens, waiting=max_waiting,
        request_seconds=request_seconds, drain_seconds=drain_seconds,
    )  # fmt: skip
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    with progress(f"loading {model}"):
        engine = open_engine(
            model, dtype=dtype, device=on, weights=weights, context=context, max_batch=max_batch, kv_int8=kv_int8, draft=draft,
            lookahead=lookahead, max_waiting=max_batch + max_waiting,
            kv_memory_bytes=None if kv_memory_mib is None else kv_memory_mib << 20,
        )  # fmt: skip
    if not keys:
        say("no API keys: " + ("open to this machine only" if is_loopback(host) else "OPEN TO EVERYONE WHO CAN REACH IT"))
    options = ServerOptions(
        keys=keys, limits=limits, slots=max_batch, name=name, local_only=is_loopback(host),
        log=None if quiet else lambda entry: log_line(entry, json_log),
    )  # fmt: skip
    run_server(engine, options, host, port, insecure=insecure_no_auth)
