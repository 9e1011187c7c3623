"""`ridgeline generate [MODEL] [PROMPT]`: text from a language model as it comes, with its speed beside the limit.

model (builtin, folder, .gguf, .bin, NAME:random) ──load_model──> Engine ──> stdout: the text | --json
                                                                          ──> stderr: tokens/s, bytes a token, per cent of the limit
--chat: a conversation in the terminal        --draft: speculation, the same text for fewer steps
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Json, emit_json, progress, say

if TYPE_CHECKING:
    from ..llm.engine.engine import Engine
    from ..llm.sampling import Sampling

BUILTIN = "builtin"
PROMPT, DEMONSTRATION = "Once upon a time", "ROMEO:\n"
FILES = (".gguf", ".bin", ".safetensors")

ModelName = Annotated[
    str | None, typer.Argument(help="A Hugging Face folder, .gguf, llama2.c .bin, NAME:random, or builtin (the default).")
]
Weights = Annotated[str | None, typer.Option("--weights", help="Store the weights as int8 or int4.")]
DtypeOf = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16, or auto.")]
Device = Annotated[str, typer.Option("--on", help="cpu, cuda, cuda:N, or auto.")]
KvInt8 = Annotated[bool, typer.Option("--kv-int8", help="Keep keys and values in int8.")]
DraftOf = Annotated[str | None, typer.Option("--draft", help="Speculate: ngram, layers:N (the model's first N layers) or a smaller model.")]
Lookahead = Annotated[int, typer.Option("--lookahead", min=1, max=64, help="Most tokens drafted at once.")]


def generate(
    model: ModelName = None,
    prompt: Annotated[str | None, typer.Argument(help="What to go on from; '-' reads it from stdin.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token always.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Only the likeliest tokens that reach this share.")] = 0.95,
    min_p: Annotated[float, typer.Option("--min-p", help="Only tokens this likely against the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", help="Above 1: tokens seen before less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty", help="Taken off tokens already in the answer.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty", help="The same, times how often they are.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option("--stop-id", help="End at this token; may be given several times.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")] = None,
    logprobs: Annotated[int | None, typer.Option("--logprobs", help="With --json: the likeliest tokens of each position.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end of text.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Talk to the model; PROMPT is its instruction.")] = False,
    weights: Weights = None,
    dtype: DtypeOf = "auto",
    on: Device = "auto",
    kv_int8: KvInt8 = False,
    draft: DraftOf = None,
    lookahead: Lookahead = 4,
    as_json: Json = False,
) -> None:
    """Generate text, or talk to a model; how fast it is stands beside how fast it could be."""
    from ..core.errors import OptionError
    from ..llm.sampling import Sampling

    if chat and as_json:
        raise OptionError("--chat with --json", why="a conversation is not one object", do="leave one of them out")
    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, stop=tuple(stop or ()), stop_ids=tuple(stop_id or ()),
        seed=seed, logprobs=logprobs if as_json else None, ignore_eos=ignore_eos,
    )  # fmt: skip
    name, text = which(model, prompt)
    with progress(f"loading {name}"):
        engine = open_engine(name, weights=weights, dtype=dtype, device=on, kv_int8=kv_int8, draft=draft, lookahead=lookahead)
    if chat:
        from .chat import Chat

        Chat(engine, sampling, text).run()
    else:
        _once(engine, text, sampling, as_json)


def which(model: str | None, prompt: str | None) -> tuple[str, str | None]:
    """(model, prompt): a single argument that is no file, folder or model's name is a prompt for the built-in model."""
    if model is not None and prompt is None and not _is_model(model):
        return BUILTIN, model
    if prompt == "-":
        prompt = sys.stdin.read()
    return model or BUILTIN, prompt


def _is_model(word: str) -> bool:
    from ..llm.load.open import PUBLISHED

    named = word == BUILTIN or word.lower() in PUBLISHED or word.endswith(":random") or word.endswith(FILES)
    try:
        return named or Path(word).exists() or ("/" in word and " " not in word)
    except OSError:  # longer than a file's name can be
        return False


def open_engine(
    name: str, *, weights: str | None, dtype: str, device: str, kv_int8: bool, draft: str | None, lookahead: int,
    context: int | None = None, **options: Any,
) -> Engine:  # fmt: skip
    """A loaded model in an engine, with its draft."""
    from ..llm.engine.engine import Engine
    from ..llm.engine.options import EngineOptions
    from ..llm.load import load_model
    from ..llm.speculate import make_draft

    loaded = load_model(name, dtype=dtype, device=device, weights=weights, context=context)
    chosen = make_draft(draft, loaded) if draft is not None else None
    return Engine(loaded, EngineOptions(kv_int8=kv_int8, draft=chosen, lookahead=lookahead, **options))


def _once(engine: Engine, text: str | None, sampling: Sampling, as_json: bool) -> None:
    from .answer import answer, figures, line
    from .chat import interrupts

    if text is None and engine.loaded.name == BUILTIN:  # its texts end with a speech, too soon for a demonstration
        text, sampling = DEMONSTRATION, replace(sampling, ignore_eos=True)
    prompt = text if text is not None else PROMPT
    ids = engine.loaded.tokenizer.encode(prompt)

    def write(piece: str) -> None:
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    write(prompt)
    with interrupts() as stopped:
        made = answer(engine, ids, sampling, write, stopped)
    write("\n")
    found = figures(engine, made)
    if as_json:
        more = {"logprobs": [entry._asdict() for entry in made.logprobs]} if made.logprobs else {}
        head = {"schema": 1, "model": engine.loaded.name, "prompt": prompt, "text": made.text, "tokens": made.tokens}
        emit_json({**head, "finish_reason": made.finish_reason, "error": made.error, **found, **more})
    else:
        say(line(found))
