"""The end of a decode step against torch's maximum, and what it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import OptionError
from ridgeline.kernel import decode_choice as module
from ridgeline.kernel.decode_choice import _decode_choice, decode_choice
from ridgeline.kernel.jit import next_power_of_2
from tests.support import FULL

SMALLER = 32  # the interpreter compares one logit after the other, in Python


def buffers(rows: int, steps: int, device: str, dtype: torch.dtype = torch.float32, more: int = 0) -> dict[str, Tensor]:
    at: dict[str, Any] = {"device": device}
    return {
        "tokens": torch.zeros(rows, dtype=torch.int64, **at),
        "best": torch.zeros(rows, dtype=dtype, **at),
        "positions": torch.arange(rows, **at) + 5,
        "lengths": torch.arange(rows, dtype=torch.int32, **at) + 6,
        "step": torch.zeros(rows, dtype=torch.int64, **at),
        "tickets": torch.zeros(rows, dtype=torch.int32, **at),
        "token_history": torch.full((steps, rows + more), -7, dtype=torch.int64, **at),
        "best_history": torch.zeros(steps, rows + more, dtype=dtype, **at),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows, vocab", [(1, 5000), (3, 2048), (3, 5000), (5, 7)])  # shares of a row; a share of one block, of several
def test_steps_are_those_of_torch(rows: int, vocab: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu" and not FULL:  # as many shares and blocks, each smaller
        monkeypatch.setattr(module, "next_power_of_2", lambda count: min(2048 // SMALLER, next_power_of_2(count)))
        vocab = max(7, vocab // SMALLER)
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    held = buffers(rows, 2, device, wide, more=1)
    for step in range(3):  # the third finds no room in the history
        logits = torch.randn(rows, vocab, device=device).to(dtype)
        if step == 1:
            logits[:, [2 * vocab // 3, vocab - 1]] = 9.0  # equal ones, in the second and third share, the later in an earlier lane
        out = decode_choice(logits, **held)
        assert out.dtype is wide and torch.equal(out, logits.to(wide))
        assert torch.equal(held["tokens"], logits.to(wide).argmax(-1)) and torch.equal(held["best"], logits.to(wide).amax(-1))
        assert (held["step"] == step + 1).all() and not held["tickets"].any()
        if step < 2:
            assert torch.equal(held["token_history"][step, :rows], held["tokens"])
            assert torch.equal(held["best_history"][step, :rows], held["best"])
    assert (held["token_history"][:, rows] == -7).all()
    assert held["positions"].tolist() == [row + 8 for row in range(rows)] and held["lengths"].tolist() == [row + 9 for row in range(rows)]


def test_the_first_of_equal_ones_and_rows_that_are_no_numbers(device: str) -> None:
    logits = torch.zeros(4, 6000, device=device)
    logits[0, [17, 3000, 5999]] = 2.0
    logits[1, 4000] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = float("inf")
    held = buffers(4, 1, device)
    decode_choice(logits, **held)
    assert held["tokens"][0] == 17 and held["tokens"][3] == 5
    assert held["best"].isfinite().tolist() == [True, False, False, False]
    assert held["tokens"].min() >= 0 and held["tokens"].max() < 6000


def test_opcheck_and_refusals(device: str) -> None:
    logits = torch.randn(2, 40, device=device)
    torch.library.opcheck(_decode_choice.overload, (logits, *buffers(2, 3, device).values()))
    for name, wrong in (("tokens", torch.zeros(2, dtype=torch.int32)), ("best", torch.zeros(3)), ("best_history", torch.zeros(3, 1))):
        with pytest.raises(OptionError):
            decode_choice(logits, **{**buffers(2, 3, device), name: wrong.to(device)})
    with pytest.raises(OptionError):
        decode_choice(logits.long(), **buffers(2, 3, device))


def test_no_sequence_at_all(device: str) -> None:
    given = buffers(0, 3, device, more=2)
    before = {name: x.clone() for name, x in given.items()}
    for dtype in (torch.float32, torch.float16):
        out = decode_choice(torch.zeros(0, 11, device=device, dtype=dtype), **given)
        assert out.shape == (0, 11) and out.dtype == torch.float32
    assert all(torch.equal(x, before[name]) for name, x in given.items())
