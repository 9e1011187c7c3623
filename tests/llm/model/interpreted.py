"""Run under TRITON_INTERPRET=1 by test_kernels.py: a decoder whose every step goes through the Triton kernels, against transformers."""

from __future__ import annotations

import sys

import torch

from ridgeline.llm.model.linear import quantise_decoder_
from tests.llm.model.support import Text, logits_of, pair, random_tokens


def main(dtype_name: str) -> None:
    dtype: torch.dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    for case in ("llama", "qwen3", "mistral, window 7"):
        theirs, ours = pair(case, dtype)
        compare(case, theirs, ours, 1e-4 if dtype is torch.float32 else 1.0)
        if dtype is not torch.float32:
            compare(case, theirs, quantise_decoder_(ours, "int8"), 1.5)


def compare(case: str, theirs, ours, bound: float) -> None:  # type: ignore[no-untyped-def]
    text = Text(ours, [random_tokens(20, 1), random_tokens(19, 2)])
    text.step({0: 18, 1: 3})  # a part and rows
    text.step({0: 1, 1: 3})  # rows of unequal sequences, as in speculation
    text.step({0: 1, 1: 1}, rows=True)
    for index in range(2):
        expected = logits_of(theirs, text.sequences[index][: text.done[index]]).float()
        difference = (text.all_logits(index) - expected).abs().max().item()
        assert difference <= bound, f"{case}, sequence {index}: {difference}"
    print(case, "agrees")


if __name__ == "__main__":
    main(sys.argv[1])
