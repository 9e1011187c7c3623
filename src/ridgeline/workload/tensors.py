"""What a formula may know about a tensor: shape, dtype, the storage behind it and the role it plays.

fx node or real tensor ──describe──> TensorInfo(value, role, shape, strides, dtype)
  elements = product of the sizes whose stride is not 0      an expanded tensor is stored, and read, once
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ..core.dtypes import ALIASES, BITS
from .graph import Operand, Role

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor seen by a formula; `strides` is None where the source (ONNX) has none."""

    value: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def elements(self) -> int:
        if self.strides is None or 0 in self.shape:
            return self.numel
        return prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride != 0 or size == 1)

    def operand(self, elements: int | None = None) -> Operand:
        """This tensor as an op's operand, of which `elements` are touched (all distinct ones unless told)."""
        return Operand(self.value, self.role, self.shape, self.dtype, self.elements if elements is None else elements)


def describe(tensor: torch.Tensor, value: str, role: Role) -> TensorInfo:
    """The TensorInfo of a real, meta or fake tensor with static shape."""
    shape, strides = tuple(int(s) for s in tensor.shape), tuple(int(s) for s in tensor.stride())
    return TensorInfo(value, role, shape, dtype_name(tensor.dtype), strides, int(tensor.storage_offset()))


def dtype_name(dtype: Any) -> str:
    """`torch.float8_e4m3fn` → `float8`; unknown exotic types keep one byte a value by being called uint8."""
    plain = str(dtype).removeprefix("torch.")
    plain = ALIASES.get(plain, plain)
    return plain if plain in BITS else ("float8" if plain.startswith("float8") else "uint8")
