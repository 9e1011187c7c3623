"""N:M sparsity: at most N weights other than zero in every M neighbours along the inputs, stored without the zeros.

    weight [out, in, …] ──nm_mask(scores)──> bool, True = pruned: the M − N lowest of each group, of equal ones the last goes first
    [out, in] with that mask ──NMLinear.pack──> values [out, in·N/M] + positions, 1, 2, 4 or 8 bits each, packed in bytes

2:4 in bfloat16: 4·16 bits become 2·16 + 2·2, a ratio of 0.5625, and on NVIDIA GPUs since Ampere torch's semi-structured kernels
multiply by it without unpacking (float16 and bfloat16, both sizes multiples of 64). Anywhere else, and for any other N:M, the
format is storage-only: the dense weight is rebuilt at the first call and kept until the layer moves. Ref: Mishra 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import OptionError, TransformError
from ..kinds import layer_kind

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_MULTIPLE = 64  # of rows and columns; torch asks for at most this for 16-bit types
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def parse_pattern(pattern: str) -> tuple[int, int]:
    """ "2:4" → (2, 4)."""
    kept, _, of = pattern.partition(":")
    if not (kept.isascii() and of.isascii() and kept.isdigit() and of.isdigit() and len(pattern) < 8 and 0 < int(kept) < int(of) <= 256):
        raise OptionError(f"pattern {pattern!r}", why="it reads N:M, N kept of M neighbours, 0 < N < M ≤ 256", do='give e.g. "2:4"')
    return int(kept), int(of)


def nm_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """True where a weight goes: all but the n largest scores of every m along dimension 1; of equal scores the first stays."""
    if scores.dim() < 2 or scores.shape[1] % m:
        raise TransformError(
            f"{n}:{m} sparsity of a weight {list(scores.shape)}",
            why=f"its inputs are not a multiple of {m}",
            do="leave this layer out with skip=",
        )
    groups = scores.movedim(1, -1).unflatten(-1, (-1, m))  # [out, …, in/m, m]
    order = groups.argsort(dim=-1, descending=True, stable=True)
    pruned = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., n:], True)
    return pruned.flatten(-2).movedim(-1, 1).contiguous()


def position_bits(m: int) -> int:
    """Bits a stored position takes: 1, 2, 4 or 8, so that none crosses a byte."""
    return next(bits for bits in (1, 2, 4, 8) if m <= 1 << bits)


def pack_positions(positions: Tensor, bits: int) -> Tensor:
    """uint8 values below 2^bits, any shape → flat bytes, the first value in the lowest bits."""
    each = 8 // bits
    flat = functional.pad(positions.flatten(), (0, -positions.numel() % each)).view(-1, each)
    packed = torch.zeros(len(flat), dtype=torch.uint8, device=flat.device)
    for place in range(each):
        packed |= flat[:, place] << (place * bits)
    return packed


def unpack_positions(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse: `count` values as uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:count]


@layer_kind("linear-n:m")
class NMLinear(nn.Module):
    """A linear layer whose weight keeps n of every m inputs; y = x Wᵀ + b."""

    positions: Tensor

    def __init__(self, in_features: int, out_features: int, n: int, m: int, bias: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not 0 < n < m <= 256 or in_features % m:
            raise ValueError(f"{n}:{m} of {in_features} inputs")
        self.in_features, self.out_features, self.n, self.m = in_features, out_features, n, m
        kept = in_features // m * n
        self.values = nn.Parameter(torch.zeros(out_features, kept, dtype=dtype), requires_grad=False)
        bytes_needed = -(-out_features * kept * position_bits(m) // 8)
        self.register_buffer("positions", torch.zeros(bytes_needed, dtype=torch.uint8))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype), requires_grad=False) if bias else None
        self._ready: tuple[tuple[Any, ...], Tensor] | None = None  # what the kernel multiplies by, and what it was made from

    @classmethod
    def pack(cls, linear: nn.Linear, n: int, m: int) -> NMLinear:
        """Pack a linear layer that already keeps at most n of m; one that does not is refused."""
        weight = linear.weight.detach()
        groups = weight.unflatten(1, (-1, m)) if weight.shape[1] % m == 0 else None
        nonzero = None if groups is None else groups != 0  # NaN counts as a value
        if groups is None or nonzero is None or int(nonzero.sum(-1).max()) > n:
            raise TransformError(
                f"a weight {list(weight.shape)} that is not {n}:{m} sparse", why="packing would lose weights", do="mask it first"
            )
        packed = cls(linear.in_features, linear.out_features, n, m, linear.bias is not None, weight.dtype).to(weight.device)
        # the places of values come first; a group with fewer than n is filled up with places of zeros
        order = nonzero.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :n].sort(dim=-1).values  # [out, in/m, n]
        packed.values.data.copy_(groups.gather(-1, order).flatten(1))
        packed.positions.copy_(pack_positions(order.to(torch.uint8), position_bits(m)))
        if packed.bias is not None and linear.bias is not None:
            packed.bias.data.copy_(linear.bias.detach())
        return packed

    def dense(self) -> Tensor:
        """The weight [out, in], exact to the bit (but −0.0 comes back as 0.0)."""
        groups = self.in_features // self.m
        places = unpack_positions(self.positions, position_bits(self.m), self.values.numel()).long().view(self.out_features, groups, self.n)
        out = self.values.new_zeros(self.out_features, groups, self.m)
        return out.scatter_(-1, places, self.values.detach().unflatten(1, (groups, self.n))).flatten(1)

    @property
    def has_kernel(self) -> bool:
        """Whether a sparse kernel runs it where it lies; else the format saves bytes only."""
        fits = self.in_features % KERNEL_MULTIPLE == 0 and self.out_features % KERNEL_MULTIPLE == 0
        return (self.n, self.m) == (2, 4) and self.values.is_cuda and self.values.dtype in KERNEL_DTYPES and fits and _ampere(self.values)

    def forward(self, x: Tensor) -> Tensor:
        # a traced graph holds the unpacking itself; a cache would be a side effect it cannot have
        weight = self.dense() if torch.compiler.is_compiling() else self._multiplier()
        return functional.linear(x, weight, self.bias)

    def _multiplier(self) -> Tensor:
        key = (self.values.device, self.values.dtype, self.values.data_ptr(), self.values._version, self.positions._version)
        if self._ready is None or self._ready[0] != key:
            if int(unpack_positions(self.positions, position_bits(self.m), self.values.numel()).max()) >= self.m:
                raise TransformError(f"a position beyond {self.m}", why="the packed positions are broken", do="load the model again")
            weight = self.dense()
            self._ready = (key, torch.sparse.to_sparse_semi_structured(weight) if self.has_kernel else weight)
        return self._ready[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}  # a copy makes its own; the sparse tensor is not to be stored

    def config(self) -> dict[str, Any]:
        return {"in_features": self.in_features, "out_features": self.out_features, "n": self.n, "m": self.m,
                "bias": self.bias is not None, "dtype": str(self.values.dtype).removeprefix("torch.")}  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NMLinear:
        return cls(**{**config, "dtype": DTYPES[config["dtype"]]})

    def logical_parameters(self) -> int:
        """Weights it stands for, zeros and bias included."""
        return self.in_features * self.out_features + (self.out_features if self.bias is not None else 0)

    def logical_nonzeros(self) -> int:
        """Of those, how many are not zero."""
        return int(torch.count_nonzero(self.values)) + (int(torch.count_nonzero(self.bias)) if self.bias is not None else 0)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.n}:{self.m}"


def _ampere(tensor: Tensor) -> bool:
    return bool(torch.cuda.get_device_capability(tensor.device) >= (8, 0))


def pack_linears(model: nn.Module, names: set[str], n: int, m: int) -> nn.Module:
    """Replace the named linear layers (weights already n:m) by packed ones, in place; the model itself if it is one of them."""
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        packed = NMLinear.pack(layer, n, m)
        if not name:
            return packed
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)
    return model
