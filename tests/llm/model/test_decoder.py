"""Logits of every family against transformers' own, however the text is cut, batched and paged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from ridgeline.llm.model import attend
from ridgeline.llm.model.decoder import Batch, Decoder
from tests.llm.model.support import CASES, Text, logits_of, pair, random_tokens

FEW = ("llama", "mistral, window 7", "qwen2, windows from layer 1", "qwen3", "gpt2")


def at_once(text: Text) -> None:
    text.step({i: len(tokens) for i, tokens in enumerate(text.sequences)})


def in_chunks(text: Text) -> None:
    """Chunks of 5, sequences that end drop out; single tokens and longer runs share steps."""
    while left := {i: min(5 + i, len(tokens) - text.done[i]) for i, tokens in enumerate(text.sequences) if text.done[i] < len(tokens)}:
        text.step(left)


def token_by_token(text: Text) -> None:
    while left := {i: 1 for i, tokens in enumerate(text.sequences) if text.done[i] < len(tokens)}:
        text.step(left, rows=True)


def mixed(text: Text) -> None:
    """The first sequence decodes while the others' prompts come in chunks, as a scheduler would do it."""
    text.step({0: len(text.sequences[0]) // 2})
    while left := {
        i: min(1 if i == 0 else 9, len(tokens) - text.done[i]) for i, tokens in enumerate(text.sequences) if text.done[i] < len(tokens)
    }:
        text.step(left)


WAYS: tuple[Callable[[Text], None], ...] = (at_once, in_chunks, token_by_token, mixed)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    theirs, ours = pair(case)
    sequences = [random_tokens(45, 1), random_tokens(18, 2), random_tokens(33, 3)]
    wanted = [logits_of(theirs, tokens) for tokens in sequences]
    for way in WAYS:
        text = Text(ours, sequences, page_size=16 if way is not in_chunks else 4)
        way(text)
        for index, expected in enumerate(wanted):
            assert text.all_logits(index).dtype is torch.float32
            difference = (text.all_logits(index) - expected).abs().max().item()
            assert difference <= 1e-4, f"{way.__name__}, sequence {index}: {difference}"


@pytest.mark.parametrize("case", FEW)
def test_decode_equals_prefill_in_float64(case: str) -> None:
    _, ours = pair(case, torch.float64)
    sequences = [random_tokens(40, 1), random_tokens(27, 2)]
    texts = [Text(ours, sequences) for _ in WAYS]
    for way, text in zip(WAYS, texts, strict=True):
        way(text)
        for index in range(len(sequences)):
            torch.testing.assert_close(text.all_logits(index), texts[0].all_logits(index), rtol=0, atol=1e-9)


def test_wanted_rows_are_those_of_all() -> None:
    _, ours = pair("llama")
    text = Text(ours, [random_tokens(20, 1)])
    at_once(text)
    batch = _batch_of(text, 20)
    with torch.inference_mode():
        some = ours(replace(batch, wanted=torch.tensor([3, 19])), text.cache)
    torch.testing.assert_close(some, text.all_logits(0)[[3, 19]], rtol=0, atol=1e-5)


def test_padding_rows_change_nothing_and_are_written_nowhere() -> None:
    _, ours = pair("llama")
    sequences = [random_tokens(20, 1), random_tokens(20, 2)]
    alone, padded = Text(ours, sequences), Text(ours, sequences)
    for text in (alone, padded):
        text.step({0: 19, 1: 11})
    alone.step({0: 1, 1: 1}, rows=True)
    before = [tensor[:-1].clone() for tensor in padded.cache.keys]
    slots = torch.tensor([_slot(padded, 0, 19), _slot(padded, 1, 11), -1, -1])
    batch = _batch_of(padded, 1)
    batch.tokens = torch.tensor([sequences[0][19], sequences[1][11], 0, 0])
    batch.positions = torch.tensor([19, 11, 0, 0])
    batch.slots, batch.starts = slots, None
    batch.page_table = torch.cat((padded.table, torch.zeros_like(padded.table)))
    batch.lengths = torch.tensor([20, 12, 0, 0], dtype=torch.int32)
    with torch.inference_mode():
        out = ours(batch, padded.cache)
    for index in range(2):
        torch.testing.assert_close(out[index], alone.logits[index][-1], rtol=0, atol=1e-5)
    for old, new in zip(before, padded.cache.keys, strict=True):
        changed = (old.nan_to_num() != new[:-1].nan_to_num()).flatten(2).any(2).flatten().nonzero().flatten().tolist()
        assert sorted(changed) == sorted(slots[:2].tolist())


def test_skipped_layers_are_those_left_out() -> None:
    """A decoder of which a layer is skipped answers as one that never had the layer."""
    _, ours = pair("llama")
    tokens = random_tokens(12, 1)
    whole = Text(ours, [tokens])
    with torch.inference_mode():
        skipped = ours(_batch_of(whole, 12), whole.cache, layers=range(0, 3, 2))
    short = Decoder(replace(ours.config, layers=2)).eval()
    kept = {name.replace("layers.2.", "layers.1."): t for name, t in ours.state_dict().items() if not name.startswith("layers.1.")}
    short.load_state_dict(kept)
    text = Text(short, [tokens])
    at_once(text)
    torch.testing.assert_close(skipped, text.all_logits(0), rtol=0, atol=1e-5)


def test_int8_cache_is_the_same_however_text_is_cut() -> None:
    _, ours = pair("llama")
    sequences = [random_tokens(40, 1), random_tokens(22, 2)]
    texts = [Text(ours, sequences, int8=True) for _ in WAYS]
    exact = Text(ours, sequences)
    at_once(exact)
    for way, text in zip(WAYS, texts, strict=True):
        way(text)
        torch.testing.assert_close(text.all_logits(0), texts[0].all_logits(0), rtol=0, atol=2e-3)
    off = (texts[0].all_logits(0) - exact.all_logits(0)).norm() / exact.all_logits(0).norm()
    assert 0 < off < 0.05


def test_casts_leave_the_angles_alone() -> None:
    _, ours = pair("llama")
    assert ours.rope is not None
    before = ours.rope.frequency.clone()
    ours.bfloat16()
    assert ours.dtype is torch.bfloat16 and ours.rope.frequency.dtype is torch.float32
    assert torch.equal(ours.rope.frequency, before)


@pytest.mark.parametrize("fault", ("scale", "window", "offset", "rope", "norm"))
def test_a_planted_error_shows(fault: str) -> None:
    """The comparison above is able to fail: each fault moves some logits by more than its bound."""
    theirs, ours = pair("mistral, window 7")
    tokens = random_tokens(30, 1)
    layer = ours.layers[0]
    assert ours.rope is not None
    if fault == "scale":
        layer.attention.out.weight = torch.nn.Parameter(layer.attention.out.weight * 1.01)  # not in place: it is their tensor too
    elif fault == "window":
        layer.attention.window = 8
    elif fault == "offset":
        ours.rope.register_forward_pre_hook(lambda rope, positions: (positions[0] + (positions[0] > 20),))
    elif fault == "rope":
        ours.rope.frequency.mul_(1.001)
    else:
        layer.perceptron_norm.eps = 1e-2
    text = Text(ours, [tokens])
    at_once(text)
    assert (text.all_logits(0) - logits_of(theirs, tokens)).abs().max() > 1e-4


def _slot(text: Text, sequence: int, position: int) -> int:
    return int(text.table[sequence, position // text.page_size]) * text.page_size + position % text.page_size


def _batch_of(text: Text, count: int):  # type: ignore[no-untyped-def]
    """The first `count` tokens of the first sequence."""
    from ridgeline.llm.model.decoder import Batch

    slots = torch.tensor([_slot(text, 0, i) for i in range(count)])
    lengths = torch.tensor([count], dtype=torch.int32)
    return Batch(torch.tensor(text.sequences[0][:count]), torch.arange(count), slots, text.table[:1], lengths, (0, count))


@pytest.mark.parametrize("case", ("llama", "llama, biases", "qwen3", "mistral, window 7"))
def test_a_step_of_one_token_computes_what_a_step_of_several_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA one token in halves takes the way where norms go with products; here both ways are plain torch, in bfloat16."""
    _, ours = pair(case, torch.bfloat16)
    sequence, ways, shapes = random_tokens(12, 4), [], []
    for one_row in (False, True):
        text = Text(ours, [sequence])
        text.step({0: 11})
        monkeypatch.setattr("ridgeline.llm.model.decoder.runs_kernels", lambda x, one_row=one_row: one_row)
        text.step({0: 1})
        ways.append(text.all_logits(0)[-1])
        shapes.append([_logits_of_one(ours, text, wanted).shape[0] for wanted in ([0], [])])
    assert (ways[1] - ways[0]).abs().max() <= 0.03 * ways[0].abs().max()
    assert shapes == [[1, 0], [1, 0]]


def _logits_of_one(model: Decoder, text: Text, wanted: list[int]) -> torch.Tensor:
    """Of one more token, as a chunk of a prompt, for the rows that are wanted."""
    one = torch.tensor([0])
    batch = Batch(
        one,
        one,
        one - 1,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        (0, 1),
        torch.tensor(wanted, dtype=torch.int64),
        (1,),
    )
    with torch.no_grad():
        found: torch.Tensor = model(batch, text.cache)
    return found


def test_prompts_are_not_read_by_what_plans_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention builds a plan for every new length: a served load has a new one in every step."""
    model, calls = pair("llama")[1], []
    plain = attend.scaled_dot_product_attention

    def noted(*args: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attend, "scaled_dot_product_attention", noted)
    at_once(Text(model, [random_tokens(9, 0)]))
    assert calls and not any(calls)
