"""One step on the device: which tokens of which requests, as tensors, through the decoder.

    pieces ──run──┬── one new token each ──> DecodeState: buffers that stay where they are ──graph of its bucket──> logits [R, V]
                  └── else (chunks of prompts, drafts to check, and decodes beside them) ──eager──> Batch ────────> logits [R, V]
    pieces ──burst(steps)──> DecodeState: forward, choose, advance, again: each token goes into the next step on the device

A bucket (1, 2, 4, 8, … requests; up to 512, 2,048, 8,192, … tokens) is captured as a CUDA graph when it is first needed, or by warm_up:
attention is launched for as many tokens as a graph's page table holds, and most sequences are short. Slots come from positions and page
table on the device, so a step uploads one small buffer, and the further steps of a burst nothing. On a CPU all is eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...kernel.decode_choice import decode_choice
from ...kernel.decode_places import decode_places
from ..model.decoder import Batch
from ..model.kernels import runs_kernels
from ..sampling import BAD_ROW

if TYPE_CHECKING:
    from ..cache.kv import KVCache
    from ..model.decoder import Decoder


Array = np.ndarray[Any, np.dtype[np.int64]]
MOST_STEPS = 256
"""Of one burst: what a state keeps the tokens of."""


@dataclass(slots=True)
class Piece:
    """The next tokens of one sequence: where they begin, the pages they go to, and of how many (the last ones) logits are wanted."""

    tokens: Sequence[int]
    position: int
    pages: Sequence[int]
    wanted: int = 1

    @property
    def decodes(self) -> bool:
        return len(self.tokens) == 1 and self.wanted == 1


class Staging:
    """Host memory that goes to the device in one copy; on a GPU it is pinned, and not written again before it was read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = torch.empty(0, dtype=torch.int64)
        self.read = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, columns: Sequence[Array]) -> list[Tensor]:
        """The int64 arrays, flat, as tensors on the device."""
        sizes = [column.size for column in columns]
        if self.read is not None:
            self.read.synchronize()
        if self.host.numel() < sum(sizes):
            self.host = torch.empty(2 * sum(sizes), dtype=torch.int64, pin_memory=self.read is not None)
        packed = self.host[: sum(sizes)]
        np.concatenate([column.reshape(-1) for column in columns], out=packed.numpy())
        there = packed.to(self.device, non_blocking=True) if self.read is not None else packed.clone()
        if self.read is not None:
            self.read.record()
        return list(there.split(sizes))


def buckets(max_batch: int) -> list[int]:
    """1, 2, 4, … up to and including max_batch."""
    sizes = [1]
    while sizes[-1] < max_batch:
        sizes.append(min(2 * sizes[-1], max_batch))
    return sizes


def widths(pages: int, page_size: int) -> list[int]:
    """Pages of a sequence's table: 512 tokens, four times as many, … up to and including all."""
    found = [min(pages, max(1, 512 // page_size))]
    while found[-1] < pages:
        found.append(min(4 * found[-1], pages))
    return found


def logits_dtype(model: Decoder) -> torch.dtype:
    """float32, but for a float64 model."""
    return torch.float64 if model.dtype is torch.float64 else torch.float32


class DecodeState:
    """The static buffers of decode steps of at most `size` requests, the step itself, and its graph.

    Rows that stand for no request are at position 0 of the cache's spare page. A step is few and small kernels beside the model:
    at 0.5 ms a token each of them is half a per cent.
    """

    def __init__(self, model: Decoder, cache: KVCache, size: int, width: int, device: torch.device) -> None:
        self.model, self.cache, self.size, self.width, self.device = model, cache, size, width, device
        even = size + size % 2  # every buffer begins at 16 bytes, or kernels are compiled once more for those that don't
        self.host_ids = np.zeros(3 * even + even // 2, dtype=np.int64)
        self.host_table = np.full((size, width), cache.pages, dtype=np.int32)
        self.known: list[list[int]] = [[] for _ in range(size)]  # the pages host_table has of each row
        ids, self.table = torch.from_numpy(self.host_ids), torch.from_numpy(self.host_table)
        if device.type != "cpu":
            ids, self.table = ids.to(device), self.table.to(device)
            self.host_ids, self.host_table = ids.cpu().pin_memory().numpy(), self.table.cpu().pin_memory().numpy()
        self.ids, self.at = ids, (even, 3 * even)
        self.tokens, self.positions, self.steps = (ids[start : start + size] for start in (0, even, 2 * even))
        self.lengths = ids[3 * even :].view(torch.int32)[:size]
        self.best = torch.zeros(size, dtype=logits_dtype(model), device=device)
        self.chosen = torch.zeros(MOST_STEPS, size, dtype=torch.int64, device=device)  # the likeliest tokens of the steps since load
        self.certain = torch.zeros(MOST_STEPS, size, dtype=logits_dtype(model), device=device)
        self.tickets = torch.zeros(size, dtype=torch.int32, device=device)
        self.rows, self.columns = size, width  # what a step computes; less where there is no graph
        self.read = torch.cuda.Event() if device.type == "cuda" else None
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.load([])

    def load(self, pieces: Sequence[Piece], steps: int = 1) -> None:
        """Fill the buffers for the next `steps` steps."""
        if self.read is not None:
            self.read.synchronize()  # the last upload may still be under way
        rows, (positions, lengths) = len(pieces), self.at
        self.host_ids[:lengths] = 0
        self.host_ids[:rows] = [piece.tokens[0] for piece in pieces]
        self.host_ids[positions : positions + rows] = [piece.position for piece in pieces]
        self.host_ids[lengths:].view(np.int32)[: self.size] = self.host_ids[positions : positions + self.size] + 1
        changed = self._load_table([piece.pages for piece in pieces])
        if self.read is not None:
            self.ids.copy_(torch.from_numpy(self.host_ids), non_blocking=True)
            if changed:
                self.table.copy_(torch.from_numpy(self.host_table), non_blocking=True)
            self.read.record()
        if self.graph is None:
            last = max((piece.position for piece in pieces), default=0) + steps - 1
            self.rows, self.columns = rows or self.size, min(self.width, last // self.cache.page_size + 1)

    def _load_table(self, pages_of_rows: Sequence[Sequence[int]]) -> bool:
        """Whether some row has other pages than before: most requests stay in their row, and get a page every page_size steps."""
        changed = False
        for row, known in enumerate(self.known):
            pages = pages_of_rows[row] if row < len(pages_of_rows) else []
            if known != pages:
                self.host_table[row] = self.cache.pages  # the spare page: a row that runs past its own harms nobody
                self.host_table[row, : len(pages)] = pages[: self.width]
                self.known[row] = list(pages)
                changed = True
        return changed

    def step(self) -> Tensor:
        """logits [rows, V]; afterwards the likeliest token of each row and its position stand in the buffers, and it is written down."""
        rows, page_size, table = self.rows, self.cache.page_size, self.table[: self.rows, : self.columns]
        tokens, positions, lengths = self.tokens[:rows], self.positions[:rows], self.lengths[:rows]
        rope, angles = self.model.rope, None
        if rope is not None and runs_kernels(positions):
            slots, *found = decode_places(positions, table, rope.frequency, page_size, rope.growth)
            angles = found[0], found[1]
        else:
            pages = table.gather(1, (positions // page_size)[:, None])[:, 0]
            slots = torch.add(positions % page_size, pages, alpha=page_size)
        narrow = self.model.narrow_logits(Batch(tokens, positions, slots, table, lengths, angles=angles), self.cache)
        kept = self.best[:rows], positions, lengths, self.steps[:rows], self.tickets[:rows], self.chosen, self.certain
        return decode_choice(narrow, tokens, *kept)

    def forward(self) -> Tensor:
        if self.graph is None:
            return self.step()
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def capture(self, pool: Any) -> None:
        """Record the step; its rows are padding meanwhile, so no page of a request is touched."""
        self.rows, self.columns = self.size, self.width
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles the kernels and lets libraries allocate what they keep
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.logits = self.step()
        self.graph = graph


class Runner:
    """The decoder and its cache behind two calls: `run` (any step) and `burst` (several decode steps on end)."""

    def __init__(self, model: Decoder, cache: KVCache, *, max_batch: int, context: int, device: torch.device, graphs: str = "auto") -> None:
        self.model, self.cache, self.device = model, cache, device
        self.context, self.width = context, -(-context // cache.page_size)
        self.sizes, self.widths = buckets(max_batch), widths(self.width, cache.page_size)
        self.states: dict[tuple[int, int], DecodeState] = {}  # by most requests and most pages of one
        self.staging = Staging(device)
        self.graphs = "off" if device.type != "cuda" else graphs
        self.pool: Any = None
        self.why_no_graphs = "" if self.graphs != "off" else "switched off" if device.type == "cuda" else "no CUDA device"

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """float32 [R, V]: the wanted logits of all pieces, in their order."""
        if all(piece.decodes for piece in pieces):
            return self._load(pieces, 1).forward()[: len(pieces)]
        return self._eager(pieces)

    @torch.inference_mode()
    def burst(self, pieces: Sequence[Piece], steps: int, choose: Callable[[Tensor, int], Tensor] | None) -> list[list[int]]:
        """Tokens [steps][R] of decoding pieces; `choose(logits, step)` draws them, None: greedy. The host waits once, at the end.

        At most MOST_STEPS. A row whose pages end before its steps do gives tokens without meaning from there on: the caller drops them.
        """
        state, rows = self._load(pieces, steps), len(pieces)
        drawn = []
        for step in range(steps):
            logits = state.forward()[:rows]
            if choose is not None:
                drawn.append(choose(logits, step))
                torch.clamp(drawn[-1], min=0, out=state.tokens[:rows])
        if choose is None:
            chosen = torch.where(state.certain[:steps, :rows].isfinite(), state.chosen[:steps, :rows], BAD_ROW)
        else:
            chosen = torch.stack(drawn)
        tokens: list[list[int]] = chosen.tolist()
        return tokens

    @torch.inference_mode()
    def warm_up(self, most: int | None = None) -> list[int]:
        """Capture the graphs of all buckets that hold at most `most` requests, largest first so that they share memory."""
        for size in sorted((size for size in self.sizes if most is None or size <= most), reverse=True):
            for width in reversed(self.widths if self.graphs != "off" else self.widths[-1:]):
                self._state(size, width)
        return self.captured()

    def captured(self) -> list[int]:
        """Buckets that have a graph, of whatever width."""
        return sorted({size for (size, _), state in self.states.items() if state.graph is not None})

    def _eager(self, pieces: Sequence[Piece]) -> Tensor:
        """Sequences of any number of new tokens; T tokens in all."""
        page_size = self.cache.page_size
        counts = np.array([len(piece.tokens) for piece in pieces], dtype=np.int64)
        starts = np.concatenate([[0], counts.cumsum()])
        tokens = np.concatenate([np.array(piece.tokens, dtype=np.int64) for piece in pieces])
        positions = np.concatenate([np.arange(piece.position, piece.position + len(piece.tokens), dtype=np.int64) for piece in pieces])
        lengths = np.array([piece.position + len(piece.tokens) for piece in pieces], dtype=np.int64)
        most_pages = int(-(-lengths.max() // page_size))
        table = np.zeros((len(pieces), most_pages), dtype=np.int64)
        for row, piece in enumerate(pieces):
            held = piece.pages[:most_pages]
            table[row, : len(held)] = held
        owner = np.repeat(np.arange(len(pieces)), counts)
        slots = table[owner, positions // page_size] * page_size + positions % page_size
        ends = zip(starts[1:], pieces, strict=True)
        wanted = np.concatenate([np.arange(end - piece.wanted, end, dtype=np.int64) for end, piece in ends])
        there = self.staging.fill([tokens, positions, slots, table, lengths, wanted])
        batch = Batch(
            there[0],
            there[1],
            there[2],
            there[3].view(len(pieces), most_pages).int(),
            there[4].int(),
            tuple(starts.tolist()),
            there[5],
            tuple(lengths.tolist()),
        )
        logits: Tensor = self.model(batch, self.cache)
        return logits

    def _load(self, pieces: Sequence[Piece], steps: int) -> DecodeState:
        """The state of the smallest bucket that holds the pieces, its buffers filled; without graphs there is one state for all."""
        state = self._state(*self._bucket(pieces, steps))
        state.load(pieces, steps)
        return state

    def _bucket(self, pieces: Sequence[Piece], steps: int) -> tuple[int, int]:
        """Requests and pages of the smallest graph that holds the pieces to their last step."""
        if self.graphs == "off":
            return self.sizes[-1], self.widths[-1]
        last = max((piece.position for piece in pieces), default=0) + steps - 1
        pages = min(last // self.cache.page_size + 1, self.widths[-1])
        return next(size for size in self.sizes if size >= len(pieces)), next(width for width in self.widths if width >= pages)

    def _state(self, size: int, width: int) -> DecodeState:
        key = size, width
        if key not in self.states:
            state = DecodeState(self.model, self.cache, size, width, self.device)
            if self.graphs != "off":
                self._capture(state)
            self.states[key] = state
        return self.states[key]

    def _capture(self, state: DecodeState) -> None:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            state.capture(self.pool)
        except RuntimeError as error:
            if self.graphs == "on":
                raise
            self.graphs, self.why_no_graphs = "off", f"capture failed: {str(error).splitlines()[0]}"
