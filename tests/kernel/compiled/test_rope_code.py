"""Machine code of rope for a Hopper GPU: everything 128 bits at a time, cos and sin without shared memory, nothing spilled."""

from __future__ import annotations

import pytest

tl = pytest.importorskip("triton.language")

from ridgeline.kernel.rope import _default, rope_kernel  # noqa: E402
from tests.kernel.sass import compiled  # noqa: E402


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("inside", [False, True])
def test_loads(inside: bool, kind: str) -> None:
    heads, key_heads, half = 32, 8, 64
    chosen = _default(heads, half, inside)
    block = chosen["HEADS"]
    constants = {"HQ": heads, "HK": key_heads, "HALF": half, "SIGNED": False, "TRANSPOSED": False, "WIDE": tl.float32, "BLOCK_D": half,
                 "BLOCK_T": chosen["TOKENS"], "BLOCK_Q": block, "BLOCK_K": block, "PARTS": (heads + key_heads) // block,
                 "SPLIT": key_heads // block,
                 "PROMPT": True, **dict.fromkeys(("sin_b", "sin_t", "qo_b", "qo_t", "qo_h", "ko_b", "ko_t", "ko_h"))}  # fmt: skip
    signature = {name: f"*{kind}" if name.endswith("ptr") else "i32" for name in rope_kernel.arg_names if name not in constants}
    code = compiled(rope_kernel, signature, constants, num_warps=chosen["num_warps"], aligned=tuple(signature))
    assert code.count(r"LDG\.E\.(?:\w+\.)*128") == code.count("LDG") > 0
    assert code.count(r"STG\.E\.(?:\w+\.)*128") == code.count("STG") > 0
    assert code.count(r"BAR\.SYNC") == 0 and code.shared == 0
    assert code.spills == 0
    assert code.count("PREEXIT") == code.count("ACQBULK") == 1  # the next kernel may start; this one reads nothing before those before end
    assert code.text.index("ACQBULK") < code.text.index("LDG")
