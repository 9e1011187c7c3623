"""A server that really listens: on a free port of this machine, in a thread (live) or a process of its own (Process)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ridgeline.llm.server.app import ServerOptions
from ridgeline.llm.server.run import DrainingServer, build, listen
from tests.support import ROOT


def until(met: Callable[[], bool], seconds: float = 15.0) -> None:
    """Wait for `met()`, or fail."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Live:
    """One running server; `server._service` is its inside."""

    def __init__(self, server: DrainingServer, port: int) -> None:
        self.server, self.port = server, port
        self.base = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.base, timeout=30)

    @property
    def worker(self) -> Any:
        return self.server._service.worker

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        """The value of one line of /metrics."""
        text = self.http.get("/metrics", headers=headers).text
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"ridgeline_{name} ")))


@contextmanager
def live(engine: Any, **options: Any) -> Iterator[Live]:
    listener = listen("127.0.0.1", 0)
    server = build(engine, ServerOptions(**options), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    running = Live(server, listener.getsockname()[1])
    until(lambda: server.started)
    try:
        yield running
    finally:
        running.http.close()
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


class Process:
    """`python -m ARGUMENTS`, which says on stderr where it serves."""

    def __init__(self, arguments: Sequence[str], **environment: str) -> None:
        self._arguments, self._environment = arguments, {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment}
        self.start()

    def start(self) -> None:
        self._running = subprocess.Popen(
            [sys.executable, "-m", *self._arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=self._environment
        )
        assert self._running.stderr is not None
        self.said: list[str] = []
        for line in self._running.stderr:
            self.said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                break
        else:
            raise AssertionError("".join(self.said))
        self.port = int(found[1])
        self.base = f"http://127.0.0.1:{self.port}"
        # the pipe must not fill up
        threading.Thread(target=lambda: self.said.extend(self._running.stderr or ()), daemon=True).start()
        until(self.healthy)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.base}/health").status_code == 200
        except httpx.TransportError:
            return False

    def resident_mib(self) -> float:
        return int(Path(f"/proc/{self._running.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Its exit code; negative: the signal that ended it."""
        self._running.send_signal(how)
        return self._running.wait(20)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running.poll() is None:
            self._running.kill()
            self._running.wait()
