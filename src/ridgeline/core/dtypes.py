"""Data types by name: their bits, and which wider type stands in where a unit lacks one.

    "bfloat16" ──bits──> 16 ──bytes_of(n elements)──> ceil(n * bits / 8)

Torch-free, so that specs and reports load in milliseconds; names equal torch's where torch has the type.
"""

from __future__ import annotations

from .checks import expect
from .errors import OptionError, nearest

BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "tfloat32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8": 8,
    "int8": 8,
    "int4": 4,
    "uint8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "bool": 8,
    "complex64": 64,
    "complex128": 128,
}

FLOATING = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8")

ALIASES = {"fp64": "float64", "fp32": "float32", "f32": "float32", "fp16": "float16", "half": "float16", "f16": "float16",
           "bf16": "bfloat16", "tf32": "tfloat32", "fp8": "float8", "float8_e4m3fn": "float8", "float8_e5m2": "float8",
           "i8": "int8", "i4": "int4"}  # fmt: skip

# Types in which the same values can be computed when a unit lacks the first one, narrowest first.
STAND_INS: dict[str, tuple[str, ...]] = {
    "int4": ("int8", "float16", "bfloat16", "float32", "float64"),
    "int8": ("float16", "bfloat16", "float32", "float64"),
    "uint8": ("int8", "float16", "bfloat16", "float32", "float64"),
    "float8": ("float16", "bfloat16", "float32", "float64"),
    "float16": ("bfloat16", "float32", "float64"),
    "bfloat16": ("float16", "float32", "float64"),
    "tfloat32": ("float32", "float64"),
    "float32": ("float64",),
    "float64": (),
}

ANALYSIS_DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8", "int8", "int4")


def canonical(name: object) -> str:
    """`bf16`, `"torch.bfloat16"`, torch.bfloat16 itself → `bfloat16`; anything else is an OptionError."""
    text = str(name) if type(name).__module__ == "torch" else name
    expect("dtype", text, str, do='give a name such as "bfloat16", or torch.bfloat16')
    plain = str(text).removeprefix("torch.").lower()
    plain = ALIASES.get(plain, plain)
    if plain not in BITS:
        close = nearest(plain, [*BITS, *ALIASES])
        raise OptionError(
            f"dtype {name!r}",
            why="not a data type Ridgeline knows" + (f"; nearest: {', '.join(close)}" if close else ""),
            do=f"use one of {', '.join(ANALYSIS_DTYPES)}",
        )
    return plain


def bytes_of(elements: int, dtype: str) -> int:
    """Bytes that `elements` values of `dtype` take when packed."""
    return -(-elements * BITS[dtype] // 8)
