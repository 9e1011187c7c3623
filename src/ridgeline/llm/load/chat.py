"""Messages to a prompt, as the model's own template writes them.

    messages [{"role", "content"}, …] ──check──> template (the model's, or a plain one) ──render.py──> text ──control tokens──> ids

Templates run in a process of their own (render.py): 5 s, 512 MiB and 4 Mi characters at most, or a clear error. What a
message says is text: a control token spelled in it does not become one, unless render_chat's text is encoded by hand.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ModelFileError, OptionError
from .loaded import Loaded
from .render import MOST_SECONDS

PLAIN_TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
"""For models that bring none."""
MOST_MESSAGES = 10_000
MOST_REQUEST_BYTES = 2**24
MOST_REPLY_BYTES = 2**25
MOST_START_S = 60
PRIVATE_USE = range(0xE000, 0xF8FF)  # characters without a meaning of their own


def render_chat(loaded: Loaded, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
    """The messages as the model's template writes them, control tokens spelled out; `answer`: up to where the assistant speaks."""
    return _render(loaded, check_messages(messages), answer)


def chat_ids(loaded: Loaded, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> list[int]:
    """The ids of a rendered chat; control tokens come from the template only, never from what a message says."""
    checked = check_messages(messages)
    specials = loaded.tokenizer.specials
    if loaded.chat_template is None:
        return loaded.tokenizer.encode(_render(loaded, checked, answer))
    said = "".join(_texts(checked))
    if not any(name in said for name in specials):
        return loaded.tokenizer.encode(_render(loaded, checked, answer), add_bos=False, special=True)
    mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in said and chr(code) not in loaded.chat_template)
    names = "|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True))
    # A mark inside the spelling keeps it from being recognised; it is taken out again once the control tokens are found.
    broken = _changed(checked, lambda text: re.sub(names, lambda found: found[0][:1] + mark + found[0][1:], text))
    ids: list[int] = []
    whole = ""  # text that no message has broken, cut as in every other chat
    for part in [*re.split(f"({names})", _render(loaded, broken, answer)), mark]:
        if mark not in part:
            whole += part
            continue
        for text, special in ((whole, True), (part.replace(mark, ""), False)):
            ids += loaded.tokenizer.encode(text, add_bos=False, special=special) if text else []
        whole = ""
    return ids


def _texts(value: Any) -> Iterator[str]:
    """Every text in messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Messages with their texts changed: roles, names and whatever else a template may write too, but for single words like "user"."""
    if isinstance(value, Mapping):
        return {
            key: part if isinstance(part, str) and key != "content" and part.isidentifier() else _changed(part, change)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(part, change) for part in value]
    return change(value) if isinstance(value, str) else value


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a role and a text; parts of a text (OpenAI's content lists) are joined."""
    if not messages or len(messages) > MOST_MESSAGES:
        raise OptionError(f"{len(messages)} messages", why=f"a chat has 1 to {MOST_MESSAGES:,}", do="give at least one")
    checked = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        content = "" if content is None else content
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise OptionError(f"message {index}", why="it has a role and a text as content", do='give {"role": "user", "content": "…"}')
        checked.append({**message, "content": content})
    return checked


def _render(loaded: Loaded, messages: list[dict[str, Any]], answer: bool) -> str:
    spelled = {index: name for name, index in loaded.tokenizer.specials.items()}
    variables = {
        "messages": messages,
        "add_generation_prompt": answer,
        "bos_token": spelled.get(-1 if loaded.bos is None else loaded.bos, ""),
        "eos_token": spelled.get(-1 if loaded.tokenizer.eos is None else loaded.tokenizer.eos, ""),
        "tools": None,
        "documents": None,
    }
    template = PLAIN_TEMPLATE if loaded.chat_template is None else loaded.chat_template
    try:
        request = json.dumps({"template": template, "variables": variables}).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError("the messages", why=f"they are no JSON ({error})", do="give texts, numbers and lists of them") from error
    if len(request) > MOST_REQUEST_BYTES:
        raise OptionError(f"messages of {len(request):,} bytes", why=f"at most {MOST_REQUEST_BYTES:,} are rendered", do="give less")
    reply = RENDERER.ask(request)
    if "text" not in reply:
        raise ModelFileError(f"the chat template of {loaded.name} failed", why=reply["error"], do="change the messages, or the template")
    return reply["text"]


class Renderer:
    """The process that renders, started when first needed and again after it had to be ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def ask(self, request: bytes) -> dict[str, str]:
        """One request, one reply; a reply with `error` where the process was too slow, or is gone."""
        with self.lock:
            try:
                process = self._running()
                assert process.stdin is not None
                process.stdin.write(request)
                process.stdin.flush()
                reply: dict[str, str] = json.loads(self._line(process, MOST_SECONDS))
            except TimeoutError:
                self.close()
                return {"error": f"it takes more than {MOST_SECONDS} s"}
            except (OSError, EOFError, ValueError):
                self.close()
                return {"error": "it ended the process that rendered it: out of memory?"}
            return reply

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            script = Path(__file__).with_name("render.py")
            # -P: the script's own folder, whose files are named after other things, stays off the import path.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            if self._line(self.process, MOST_START_S) != b"ready":
                raise EOFError
        return self.process

    def _line(self, process: subprocess.Popen[bytes], most_s: float) -> bytes:
        """The next line of its answer."""
        assert process.stdout is not None
        found, end_s = bytearray(), time.monotonic() + most_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not found.endswith(b"\n"):
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise TimeoutError
                part = os.read(process.stdout.fileno(), 2**16)  # past the buffer: the selector sees the pipe only
                if not part or len(found) > MOST_REPLY_BYTES:
                    raise EOFError
                found += part
        return bytes(found[:-1])

    def close(self) -> None:
        """End the process; the next request starts another."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # what was still to be written to a process that is gone
                        stream.close()
            self.process = None


RENDERER = Renderer()
atexit.register(RENDERER.close)
