"""Decode steps in padded buckets and bursts: rows that stand for nobody touch nothing. Graphs themselves: tests/gpu."""

from __future__ import annotations

import torch

from ridgeline.llm.cache.kv import KVCache
from ridgeline.llm.engine.runner import DecodeState, Piece, Runner, buckets, widths
from tests.llm.engine.support import CONFIG, PROMPTS, reference_greedy, reference_logits, tiny

DEVICE = torch.device("cpu")


def runner(page_size: int = 8) -> tuple[Runner, KVCache]:
    cache = KVCache(CONFIG, 40, page_size, torch.float32)
    return Runner(tiny().model, cache, max_batch=6, context=CONFIG.context, device=DEVICE), cache


def test_buckets_end_with_the_largest_batch() -> None:
    assert buckets(1) == [1] and buckets(8) == [1, 2, 4, 8] and buckets(6) == [1, 2, 4, 6]


def test_logits_of_a_mixed_step_come_in_the_order_of_the_pieces() -> None:
    work, _ = runner()
    first, second, third = (list(prompt.encode()) for prompt in PROMPTS[:3])
    work.run([Piece(first[:10], 0, [3, 9]), Piece(third[:-1], 0, [5, 6, 7], wanted=0)])
    logits = work.run([Piece(third[-1:], len(third) - 1, [5, 6, 7, 30]), Piece(first[10:], 10, [3, 9, 1], wanted=2), Piece(second, 0, [0])])
    expected = [reference_logits(tiny(), tokens) for tokens in (third, first[:-1], first, second)]
    assert torch.allclose(logits, torch.stack(expected), atol=1e-4)


def test_a_graph_is_chosen_by_requests_and_tokens() -> None:
    assert widths(512, 16) == [32, 128, 512] and widths(8, 16) == [8] and widths(100, 16) == [32, 100]
    work, cache = runner()
    work.graphs, work.sizes, work.widths = "on", [1, 2, 4], [4, 16, 20]
    page = cache.page_size
    assert work._bucket([Piece([1], 0, [0])], 1) == (1, 4)
    assert work._bucket([Piece([1], 4 * page - 2, [0])], 2) == (1, 4)
    assert work._bucket([Piece([1], 4 * page - 2, [0]), Piece([1], 0, [0]), Piece([1], 0, [0])], 3) == (4, 16)
    assert work._bucket([Piece([1], 19 * page, [0])], 5 * page) == (1, 20)  # steps past the context give tokens that are dropped
    work.graphs = "off"
    assert work._bucket([Piece([1], 0, [0])], 1) == (4, 20)


@torch.inference_mode()
def test_padding_rows_write_nowhere_and_change_nothing() -> None:
    work, cache = runner()
    prompt = list(PROMPTS[0].encode())
    work.run([Piece(prompt[:-1], 0, [4, 2, 8])])
    state = DecodeState(tiny().model, cache, 4, work.width, DEVICE)
    before = [tensor[:-1].clone() for tensor in cache.keys + cache.values]
    state.load([])
    state.forward()
    assert all(tensor[:-1].equal(old) for tensor, old in zip(cache.keys + cache.values, before, strict=True))
    state.load([Piece(prompt[-1:], len(prompt) - 1, [4, 2, 8])])
    state.rows, state.columns = state.size, state.width  # as a graph has it
    assert torch.allclose(state.forward()[0], reference_logits(tiny(), prompt), atol=1e-4)
    changed = [(tensor[:-1] != old).flatten(2).any(-1).nonzero().tolist() for tensor, old in zip(cache.keys, before, strict=False)]
    assert changed == [[[8, (len(prompt) - 1) % 8]]] * CONFIG.layers  # the one place of the one request
    assert state.tokens[0] == reference_greedy(PROMPTS[0], 1)[0] and state.positions[0] == len(prompt)


def test_a_burst_past_its_pages_harms_nobody() -> None:
    work, cache = runner()
    prompt = list(PROMPTS[0].encode())  # three pages, full
    work.run([Piece(prompt[:-1], 0, [4, 2, 8]), Piece(prompt[:-1], 0, [10, 11, 12])])
    before = [tensor[:-1].clone() for tensor in cache.keys]
    pieces = [Piece(prompt[-1:], len(prompt) - 1, [4, 2, 8]), Piece(prompt[-1:], len(prompt) - 1, [10, 11, 12, 13])]
    lines = work.burst(pieces, 6, None)
    assert tuple(line[1] for line in lines) == reference_greedy(PROMPTS[0], 6)
    assert lines[0][0] == lines[0][1]
    for tensor, old in zip(cache.keys, before, strict=True):
        pages = (tensor[:-1] != old).flatten(1).any(-1).nonzero().flatten().tolist()
        assert pages == [8, 12, 13]


def test_a_chosen_token_goes_into_the_next_step() -> None:
    work, _ = runner()
    prompt = list(PROMPTS[0].encode())
    work.run([Piece(prompt[:-1], 0, [4, 2, 8])])
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(logits[0].clone())
        return torch.tensor([[65], [66], [67]][step])

    assert work.burst([Piece(prompt[-1:], len(prompt) - 1, [4, 2, 8, 0])], 3, choose) == [[65], [66], [67]]
    for step, added in enumerate(([], [65], [65, 66])):
        assert torch.allclose(seen[step], reference_logits(tiny(), prompt + added), atol=1e-4)
