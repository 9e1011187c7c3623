"""API keys: where they come from, and how one is compared.

    RIDGELINE_API_KEYS (commas) or --api-key-file (one a line, # comments) ──> ApiKeys
    Authorization: Bearer KEY ──every key, constant time──> a name for the client (a hash), or None

Keys are never logged, never in argv, and only their hashes are kept in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...core.errors import OptionError

VARIABLE = "RIDGELINE_API_KEYS"
SHORTEST_KEY = 16
LARGEST_FILE_BYTES = 1 << 20


class ApiKeys:
    """The keys that open the server; none at all means it is open to whoever can reach it."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        unique = dict.fromkeys(keys)
        for key in unique:
            if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise OptionError(
                    f"an API key of {len(key)} characters",
                    why=f"a key is at least {SHORTEST_KEY} printable ASCII characters without spaces",
                    do="make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
                )
        self._digests = [_digest(key) for key in unique]

    @property
    def count(self) -> int:
        return len(self._digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def client(self, authorization: str | None) -> str | None:
        """The name of whoever holds a right key, else None. Every key is compared, whatever the outcome so far."""
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        found = None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = known.hex()[:12]
        return found if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    # equal lengths, so that the comparison's time says nothing about the key's length either
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load_keys(file: Path | None = None, environment: Mapping[str, str] | None = None) -> ApiKeys:
    """The keys of the environment and of the file, together."""
    keys = [key.strip() for key in (environment if environment is not None else os.environ).get(VARIABLE, "").split(",")]
    keys = [key for key in keys if key]
    if file is not None:
        lines = [line.strip() for line in _read(file).splitlines()]
        added = [line for line in lines if line and not line.startswith("#")]
        if not added:
            raise OptionError(f"--api-key-file {file}", why="it has no key in it", do="put one key on each line")
        keys += added
    return ApiKeys(keys)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE_BYTES:
            raise OptionError(f"--api-key-file {file}", why="it is larger than 1 MiB", do="put one key on each line, nothing else")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--api-key-file {file}", why="it cannot be read as text", do="check the path and its permissions") from error


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: ApiKeys, insecure: bool) -> None:
    """Refuse to open the server to a network without keys, unless it was asked for in so many words."""
    if not keys and not insecure and not is_loopback(host):
        raise OptionError(
            f"--host {host} without API keys",
            why="anyone who can reach this address could use the server",
            do=f"set {VARIABLE} or --api-key-file, bind 127.0.0.1, or say --insecure-no-auth",
        )
