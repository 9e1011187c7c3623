"""Machine code of paged attention for sm_90: 128-bit copies into shared memory, tensor cores, no spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from ridgeline.kernel.paged_attention import paged_combine, paged_scatter, paged_split
from tests.kernel.sass import compiled


@pytest.mark.parametrize("int8", [False, True])
def test_split_streams_pages_in_128_bits_to_tensor_cores(int8: bool) -> None:
    constants = {
        "PAGE": 16,
        "WINDOWED": int8,
        "DIRECT": False,
        "UPCAST": False,
        "D": 128,
        "BLOCK_D": 128,
        "BLOCK_G": 16,
        "BLOCK_N": 64,
        "PROMPT": int8,
    }
    named = {"lse_ptr": "*fp32", "out_ptr": "*fp32", "table_ptr": "*i32", "lengths_ptr": "*i32", "scale": "fp32"}
    if int8:
        named |= {"k_ptr": "*i8", "v_ptr": "*i8", "k_scale_ptr": "*fp16", "v_scale_ptr": "*fp16"}
    else:
        constants |= {"k_scale_ptr": None, "v_scale_ptr": None}
    names = [name for name in paged_split.arg_names if name not in constants]
    signature = {name: named.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    aligned = tuple(name for name in names if "_" in name)
    code = compiled(paged_split, signature, constants, num_warps=8 if int8 else 4, num_stages=3, aligned=aligned)
    assert code.spills == 0
    # 64 keys and 64 values of 256 bytes by 128 threads (int8: 128 by 256), 16 bytes each
    assert code.count(r"LDGSTS\.E\.[A-Z.]*128") >= (4 if int8 else 16)
    assert code.count(r"\bHMMA") > 0
    assert code.count("ACQBULK") == int8  # waits for the kernel before
    assert code.registers <= (128 if int8 else 102)  # two of 8 and five of 4 warps a processor


def test_combine_and_scatter_read_in_128_bits() -> None:
    constants = {"BLOCK_S": 4, "UPCAST": False, "D": 128, "BLOCK_D": 128, "PROMPT": True}
    signature = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16", "splits": "i32"}
    code = compiled(paged_combine, signature, constants, aligned=("part_ptr", "lse_ptr", "out_ptr"))
    assert code.spills == 0
    assert code.count(r"LDG\.E\.[A-Z.]*128") > 0
    constants = {"PAGE": 16, "D": 128, "BLOCK_D": 128, "BLOCK_H": 8}
    names = [name for name in paged_scatter.arg_names if name not in constants]
    signature = {name: "*i32" if name == "slots_ptr" else "*bf16" if name.endswith("_ptr") else "i32" for name in names}
    code = compiled(paged_scatter, signature, constants, aligned=tuple(name for name in names if "_" in name))
    assert code.spills == 0
    assert code.count(r"LDG\.E\.[A-Z.]*128") >= 2
    assert code.count(r"STG\.E\.[A-Z.]*128") >= 2
