"""Depthwise convolutions of many branches of a few inputs at once, forward and backward.

    x [B, S*C, H, W], S inputs of C channels side by side; Bank: which input each branch reads, kernel size by kernel size
      ──bank_forward──> [B, branches*C, ⌈H/stride⌉, ⌈W/stride⌉]      out[branch, c] = weight[branch, c] ∗ relu(x[source(branch), c])
      ──bank_grad_input──>  [B, S*C, H, W]      ──bank_grad_weight──> one [branches of that size, C, k, k] a kernel size

Inputs are not copied for the branches that share them, ReLU is not stored, results land side by side: the products that follow read
them as they lie. Two ways, the same numbers but for rounding: "torch" (cuDNN or torch's own kernels) and "triton" (sums in float32).
A bank with flags (`on`, on the device: their values are not known to Python) skips the branches that are off: Triton gives zeros for them
and for their weights' gradients and does not read what they would send back; torch computes them all, and who asks multiplies by zero.
Zero padding of dilation*(k-1)/2, odd kernels, strides 1 and 2. Functions without autograd: search/supernet/batched.py has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from . import depthwise_kernels as kernels
from .jit import HAVE_TRITON, INTERPRETED, cdiv, launch, next_power_of_2

WAYS = ("auto", "torch", "triton")
TILE = 512
"""Places a program computes at a time."""
PROGRAMS = 4096
"""Of grad weight, about: 30 a processor of an H200."""
UNALIGNED = 3
"""See depthwise_kernels.py."""
LARGEST_KERNEL = 5


@dataclass(frozen=True, slots=True)
class Bank:
    """`sources[i]` [branches of size i]: the input of each branch, rising; `starts[i]` [S+1]: where the branches of each input start."""

    channels: int
    stride: int
    dilation: int
    sources: tuple[Tensor, ...]
    starts: tuple[Tensor, ...]
    places: tuple[tuple[int, ...], ...]
    """`sources`, known to Python."""
    relu: bool = True
    on: tuple[Tensor, ...] | None = None
    """[branches of size i], 0 where a branch is off; None: all are on."""

    def flags(self) -> tuple[Tensor, ...]:
        """Something to point at where there are none."""
        return self.sources if self.on is None else self.on

    def branches(self) -> int:
        return sum(len(places) for places in self.places)


def make_bank(
    places: Sequence[Sequence[int]], inputs: int, channels: int, stride: int = 1, dilation: int = 1, *, device: torch.device | str = "cpu"
) -> Bank:
    """The sources of each kernel size's branches, in rising order."""
    sources = tuple(torch.tensor(list(one), dtype=torch.int32, device=device) for one in places)
    starts = tuple(torch.tensor(start_places(one, inputs), dtype=torch.int32, device=device) for one in places)
    return Bank(channels, stride, dilation, sources, starts, tuple(tuple(one) for one in places))


def start_places(sources: Sequence[int], inputs: int) -> list[int]:
    """Where each input's branches start among branches in rising order of their source."""
    return [sum(source < place for source in sources) for place in range(inputs + 1)]


def chosen_way(x: Tensor, way: str = "auto") -> str:
    """Triton where it runs and its float32 sums are enough."""
    if way == "torch" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "torch"
    if way == "triton" and HAVE_TRITON and (x.is_cuda or INTERPRETED):
        return "triton"
    return "triton" if x.is_cuda and HAVE_TRITON else "torch"


def bank_forward(x: Tensor, weights: Sequence[Tensor], bank: Bank, way: str = "auto") -> Tensor:
    """weights[i] [branches of size i, C, k, k]; float32 weights are used as they are by "triton", in x's dtype by "torch"."""
    if chosen_way(x, way) == "torch":
        rectified = functional.relu(x) if bank.relu else x
        found = [_convolved(rectified, weight, bank, at) for at, weight in enumerate(weights)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)
    x = x.contiguous()
    height, width = (cdiv(side, bank.stride) for side in x.shape[2:])
    out = torch.empty(x.shape[0], bank.branches() * bank.channels, height, width, dtype=x.dtype, device=x.device)
    cols = min(next_power_of_2(height * width), TILE)
    rows, first = TILE // cols, 0
    for weight, source, on in zip(weights, bank.sources, bank.flags(), strict=True):
        channels = weight.shape[0] * bank.channels
        part = out[:, first : first + channels]
        first += channels
        launch(kernels.bank_forward, (channels, cdiv(x.shape[0], rows), cdiv(height * width, cols)), x, weight.contiguous(), source, on,
               part, x.shape[0], x.stride(0), out.stride(0), UNALIGNED, C=bank.channels, H=x.shape[2], W=x.shape[3], HO=height, WO=width,
               K=weight.shape[-1], DILATION=bank.dilation, STRIDE=bank.stride, RELU=bank.relu, MASKED=bank.on is not None, ROWS=rows,
               COLS=cols, num_warps=4)  # fmt: skip
    return out


def bank_grad_input(grad: Tensor, x: Tensor, weights: Sequence[Tensor], bank: Bank, way: str = "auto") -> Tensor:
    """d / d x, the ReLU's step included."""
    if chosen_way(x, way) == "torch":
        return _torch_backward(grad, x, weights, bank, [True, False])[0]
    grad, x = grad.contiguous(), x.contiguous()
    height, width = grad.shape[2:]
    cols = min(next_power_of_2(x.shape[2] * x.shape[3]), TILE)
    rows, first, total = TILE // cols, 0, None
    parts = []
    for weight, starts, on in zip(weights, bank.starts, bank.flags(), strict=True):
        channels = weight.shape[0] * bank.channels
        if channels:
            parts.append((grad[:, first : first + channels], weight.contiguous(), starts, on, weight.shape[-1]))
        first += channels
    for at in range(0, len(parts), 2):
        pair = parts[at : at + 2]
        (g0, w0, starts0, on0, k0), (g1, w1, starts1, on1, k1) = pair if len(pair) == 2 else (pair[0], (*pair[0][:4], 0))
        out = torch.empty_like(x)
        launch(kernels.bank_grad_input, (x.shape[1], cdiv(x.shape[0], rows), cdiv(x.shape[2] * x.shape[3], cols)), x, out, g0, w0, starts0,
               on0, g1, w1, starts1, on1, x.shape[0], x.stride(0), grad.stride(0), UNALIGNED, C=bank.channels, H=x.shape[2],
               W=x.shape[3], HO=height, WO=width, K0=k0, K1=k1, DILATION=bank.dilation, STRIDE=bank.stride, RELU=bank.relu,
               MASKED=bank.on is not None, ROWS=rows, COLS=cols, num_warps=4)  # fmt: skip
        total = out if total is None else total + out
    return torch.zeros_like(x) if total is None else total


def bank_grad_weight(grad: Tensor, x: Tensor, weights: Sequence[Tensor], bank: Bank, way: str = "auto") -> list[Tensor]:
    """d / d each of the weights, in its dtype."""
    if chosen_way(x, way) == "torch" or any(weight.shape[-1] > LARGEST_KERNEL for weight in weights):
        return _torch_backward(grad, x, weights, bank, [False, True])[1]
    grad, x = grad.contiguous(), x.contiguous()
    height, width = grad.shape[2:]
    cols = min(next_power_of_2(height * width), TILE)
    found, first = [], 0
    for weight, source, on in zip(weights, bank.sources, bank.flags(), strict=True):
        channels, kernel = weight.shape[0] * bank.channels, weight.shape[-1]
        part = grad[:, first : first + channels]
        first += channels
        if not channels:
            found.append(torch.zeros_like(weight))
            continue
        rows = TILE // cols
        wanted = cdiv(PROGRAMS, channels * kernel)
        images = rows * max(1, x.shape[0] // (wanted * rows))
        shares = cdiv(x.shape[0], images)
        partial = torch.empty(shares, channels, kernel, kernel, dtype=torch.float32, device=x.device)
        launch(kernels.bank_grad_weight, (channels, shares, kernel), x, part, source, on, partial, x.shape[0], images,
               x.stride(0), grad.stride(0), UNALIGNED, C=bank.channels, H=x.shape[2], W=x.shape[3], HO=height, WO=width, K=kernel,
               DILATION=bank.dilation, STRIDE=bank.stride, RELU=bank.relu, MASKED=bank.on is not None, ROWS=rows, COLS=cols,
               num_warps=4)  # fmt: skip
        found.append(partial.sum(0).view_as(weight).to(weight.dtype))
    return found


def _picked(x: Tensor, bank: Bank, at: int) -> Tensor:
    """The inputs of one kernel size's branches, side by side; a run of inputs, each once, is a view."""
    places = bank.places[at]
    if places and list(places) == list(range(places[0], places[0] + len(places))):
        return x[:, places[0] * bank.channels : (places[0] + len(places)) * bank.channels]
    inputs = x.view(x.shape[0], -1, bank.channels, *x.shape[2:])
    return inputs.index_select(1, bank.sources[at]).flatten(1, 2)


def _convolved(x: Tensor, weight: Tensor, bank: Bank, at: int) -> Tensor:
    inputs, kernel = _picked(x, bank, at), weight.shape[-1]
    if not inputs.shape[1]:
        return x.new_empty(x.shape[0], 0, *(cdiv(side, bank.stride) for side in x.shape[2:]))
    flat = weight.reshape(-1, 1, kernel, kernel).to(x.dtype)
    padding = bank.dilation * (kernel // 2)
    return functional.conv2d(inputs, flat, None, bank.stride, padding, bank.dilation, inputs.shape[1])


def _torch_backward(grad: Tensor, x: Tensor, weights: Sequence[Tensor], bank: Bank, needs: list[bool]) -> tuple[Tensor, list[Tensor]]:
    rectified = functional.relu(x) if bank.relu else x
    inputs = torch.zeros(x.shape[0], x.shape[1] // bank.channels, bank.channels, *x.shape[2:], dtype=x.dtype, device=x.device)
    found, first = [], 0
    for at, weight in enumerate(weights):
        channels, kernel = weight.shape[0] * bank.channels, weight.shape[-1]
        if not channels:
            found.append(torch.zeros_like(weight))
            continue
        flat, padding = weight.reshape(-1, 1, kernel, kernel).to(x.dtype), [bank.dilation * (kernel // 2)] * 2
        grad_input, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad[:, first : first + channels], _picked(rectified, bank, at), flat, None, [bank.stride] * 2, padding, [bank.dilation] * 2,
            False, [0, 0], channels, [*needs, False],
        )  # fmt: skip
        first += channels
        if needs[0]:
            inputs.index_add_(1, bank.sources[at], grad_input.view(x.shape[0], -1, bank.channels, *x.shape[2:]))
        if needs[1]:
            found.append(grad_weight.view_as(weight).to(weight.dtype))
    total = inputs.flatten(1, 2)
    return torch.where(x > 0, total, 0.0) if bank.relu else total, found
