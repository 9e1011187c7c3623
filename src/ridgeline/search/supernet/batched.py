"""Ops of many edges at once, in few kernels.

    Separable  x [B, S*C, H, W] ──relu, depthwise of all branches──> ──one product a branch──> ──batch norm──> (again) ──> mixing
    Dense      x ──relu, one convolution to all branches of a source──> mixing
    Reducing   the skip of stride 2: two products a branch on the even and the odd places ──> mixing
    mixing.py: [B, branches*C, H', W'] ──batch norm, gain, sum over the branches of a target──> [B, targets*C, H', W']

A branch is one op on one edge. Batch norm has no affine part in a search and works channel by channel, so that of branches side by side is
that of each; the architecture's share of a branch is its gain. Batch statistics are used always, running ones are not kept: a state's
distribution depends on which ops are on, so those of training would be wrong for any other policy.

On: flags of branches on the device, for a pass whose ops Python does not know; those that are off have a gain of 0, and Triton skips them.
The products and Dense's convolutions are torch's and compute all branches: of zeros, where Triton wrote them.

Lean: depthwise results are not stored for the backward pass but computed again; the plain form can be differentiated twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...kernel.depthwise import Bank, bank_forward, bank_grad_input, bank_grad_weight, chosen_way, start_places
from .layout import Group
from .mixing import Routes, normalise


class Indices:
    """Lists of whole numbers on their way to a device: one copy for all, each then a slice that starts at a multiple of 16 bytes."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.tensor: Tensor | None = None

    def add(self, values: Sequence[int]) -> slice:
        self.values += [0] * (-len(self.values) % 4)
        first = len(self.values)
        self.values += values
        return slice(first, first + len(values))

    def send(self, device: torch.device) -> None:
        """Pinned and asynchronous on CUDA: the host does not wait."""
        here = torch.tensor(self.values or [0], dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tensor = here.to(device, non_blocking=True)

    def __getitem__(self, place: slice) -> Tensor:
        assert self.tensor is not None
        return self.tensor[place]


@dataclass(frozen=True, slots=True)
class On:
    """0 where a branch is off."""

    whole: Tensor
    """[branches]"""
    of_ops: tuple[Tensor, ...]
    """The same op by op: tensors of their own, so that each starts at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class Branches:
    """What of a family of ops is computed; indices of branches count op first, then edge. None: all of them."""

    indices: Indices
    edges: tuple[tuple[int, ...], ...]
    """Active edges of each op."""
    sources: tuple[slice, ...]
    starts: tuple[slice, ...]
    second_sources: tuple[slice, ...]
    second_starts: tuple[slice, ...]
    picked: tuple[slice, ...] | None
    """Each op's edges."""
    picked_all: slice | None
    gains: slice
    """Places in the flat [edges, ops] shares."""
    gains_of_ops: tuple[slice, ...]
    targets: tuple[int, ...]
    source_places: tuple[int, ...]
    target_count: int
    target: slice
    order: slice
    target_starts: slice

    @property
    def count(self) -> int:
        return len(self.targets)

    @property
    def routes(self) -> Routes:
        found = self.indices
        tensors = (found[self.target], found[self.order], found[self.target_starts])
        return Routes(self.targets, self.target_count, self.picked is None, *tensors)

    def gain(self, shares: Tensor) -> Tensor:
        """[branches] of the group's shares [edges, ops]."""
        return shares.reshape(-1).index_select(0, self.indices[self.gains])

    def on(self, chosen: Tensor) -> On:
        """Of the group's flags [edges, ops]."""
        flat = chosen.reshape(-1)
        return On(self.gain(chosen), tuple(flat.index_select(0, self.indices[one]) for one in self.gains_of_ops))


def make_branches(group: Group, ops: Sequence[int], op_count: int, active: Sequence[Sequence[int]], indices: Indices) -> Branches:
    """`ops`: the columns of the family's ops; `active[edge]`: the columns computed on that edge of the group."""
    edges = tuple(tuple(edge for edge in range(group.edges) if op in active[edge]) for op in ops)
    flat = [(place, edge) for place, of_op in enumerate(edges) for edge in of_op]
    whole = len(flat) == len(ops) * group.edges
    runs = [range(sum(map(len, edges[:place])), sum(map(len, edges[: place + 1]))) for place in range(len(ops))]
    targets = [group.target_place(edge) for _, edge in flat]
    by_source = [[group.source_place(edge) for edge in of_op] for of_op in edges]
    return Branches(
        indices, edges,
        tuple(indices.add(one) for one in by_source),
        tuple(indices.add(start_places(one, len(group.sources))) for one in by_source),
        tuple(indices.add(list(run)) for run in runs),
        tuple(indices.add(start_places(run, len(flat))) for run in runs),
        None if whole else tuple(indices.add(list(of_op)) for of_op in edges),
        None if whole else indices.add([place * group.edges + edge for place, edge in flat]),
        indices.add([edge * op_count + ops[place] for place, edge in flat]),
        tuple(indices.add([edge * op_count + op for edge in of_op]) for op, of_op in zip(ops, edges, strict=True)),
        tuple(targets),
        tuple(group.source_place(edge) for _, edge in flat),
        len(group.targets),
        indices.add(targets),
        indices.add(sorted(range(len(flat)), key=lambda branch: targets[branch])),
        indices.add(start_places(targets, len(group.targets))),
    )  # fmt: skip


def multiply(x: Tensor, matrices: Tensor) -> Tensor:
    """A 1x1 convolution for each branch: x [B, R*C, H, W], matrices [R, D, C] -> [B, R*D, H, W]"""
    branches, wide, channels = matrices.shape
    flat = x.reshape(x.shape[0], branches, channels, -1)
    return torch.matmul(matrices.to(x.dtype), flat).view(x.shape[0], branches * wide, *x.shape[2:])


class _LeanSeparable(torch.autograd.Function):
    """relu, depthwise, product; keeps x and the weights only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, bank: Bank, way: str, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices, *weights)
        ctx.bank, ctx.way = bank, way
        return multiply(bank_forward(x, weights, bank, way), matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, matrices, *weights = ctx.saved_tensors
        bank, way = ctx.bank, ctx.way
        grad = grad.reshape(grad.shape[0], matrices.shape[0], matrices.shape[1], -1)
        grad_matrices = None
        if ctx.needs_input_grad[1]:
            between = bank_forward(x, weights, bank, way).view(x.shape[0], matrices.shape[0], bank.channels, -1)
            grad_matrices = torch.matmul(grad, between.transpose(2, 3)).sum(0, dtype=matrices.dtype)
        needs_weights = any(ctx.needs_input_grad[4:])
        if not (ctx.needs_input_grad[0] or needs_weights):
            return None, grad_matrices, None, None, *([None] * len(weights))
        height, width = (-(-side // bank.stride) for side in x.shape[2:])
        behind = torch.matmul(matrices.to(x.dtype).transpose(1, 2), grad).view(x.shape[0], -1, height, width)
        grad_x = bank_grad_input(behind, x, weights, bank, way) if ctx.needs_input_grad[0] else None
        grads = bank_grad_weight(behind, x, weights, bank, way) if needs_weights else [None] * len(weights)
        return grad_x, grad_matrices, None, None, *grads


class Family(nn.Module):
    """Ops of one form on all edges of a group; gain [branches]."""

    def __init__(self, group: Group, ops: Sequence[int], channels: int, stride: int, way: str) -> None:
        super().__init__()
        self.group, self.ops, self.channels, self.stride, self.way = group, tuple(ops), channels, stride, way

    def forward(self, x: Tensor, gain: Tensor, branches: Branches, on: On | None = None) -> Tensor:
        raise NotImplementedError

    def picked(self, weight: Tensor, branches: Branches) -> Tensor:
        """Of a weight for all branches, those computed."""
        return weight if branches.picked_all is None else weight.index_select(0, branches.indices[branches.picked_all])


class Separable(Family):
    """relu, depthwise k x k, 1x1, batch norm; `twice`: and again at stride 1 (DARTS's separable convolution)."""

    def __init__(
        self, group: Group, ops: Sequence[int], channels: int, stride: int, way: str, kernels: Sequence[int], *,
        dilation: int = 1, twice: bool = False, lean: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(group, ops, channels, stride, way)
        self.dilation, self.lean = dilation, lean
        self.depthwise = nn.ModuleList()
        self.matrices = nn.ParameterList()
        for _ in range(2 if twice else 1):
            self.depthwise.append(nn.ParameterList([_uniform((group.edges, channels, k, k), k * k) for k in kernels]))
            self.matrices.append(_uniform((len(kernels) * group.edges, channels, channels), channels))

    def forward(self, x: Tensor, gain: Tensor, branches: Branches, on: On | None = None) -> Tensor:
        found, flags = branches.indices, None if on is None else on.whole
        first = Bank(
            self.channels, self.stride, self.dilation, tuple(found[one] for one in branches.sources),
            tuple(found[one] for one in branches.starts),
            tuple(tuple(self.group.source_place(edge) for edge in of_op) for of_op in branches.edges),
            on=None if on is None else on.of_ops,
        )  # fmt: skip
        y = self.stage(0, x, first, branches)
        if len(self.matrices) == 2:
            runs = [range(sum(map(len, branches.edges[:at])), sum(map(len, branches.edges[: at + 1]))) for at in range(len(branches.edges))]
            second = replace(
                first, stride=1, sources=tuple(found[one] for one in branches.second_sources),
                starts=tuple(found[one] for one in branches.second_starts), places=tuple(tuple(run) for run in runs),
            )  # fmt: skip
            y = self.stage(1, normalise(y, self.channels, way=self.way, on=flags), second, branches)
        return normalise(y, self.channels, gain, branches.routes, self.way, flags)

    def stage(self, number: int, x: Tensor, bank: Bank, branches: Branches) -> Tensor:
        weights = list(self.depthwise[number])  # type: ignore[call-overload]
        if branches.picked is not None:
            weights = [w.index_select(0, branches.indices[place]) for w, place in zip(weights, branches.picked, strict=True)]
        matrices = self.picked(self.matrices[number], branches)
        if self.lean or chosen_way(x, self.way) == "triton":
            out: Tensor = _LeanSeparable.apply(x, matrices, bank, self.way, *weights)  # type: ignore[no-untyped-call]
            return out
        return multiply(bank_forward(x, weights, bank, "torch"), matrices)


class Dense(Family):
    """relu, k x k convolution, batch norm: one convolution a source to the channels of all its branches."""

    def __init__(self, group: Group, ops: Sequence[int], channels: int, stride: int, way: str, kernel: int) -> None:
        super().__init__(group, ops, channels, stride, way)
        self.weight = _uniform((group.edges, channels, channels, kernel, kernel), kernel * kernel * channels)

    def forward(self, x: Tensor, gain: Tensor, branches: Branches, on: On | None = None) -> Tensor:
        weight, kernel = self.picked(self.weight, branches), self.weight.shape[-1]
        inputs = functional.relu(x).split(self.channels, dim=1)
        found = []
        for place, one in enumerate(inputs):
            mine = [at for at, source in enumerate(branches.source_places) if source == place]
            if mine:  # branches of one source follow one another
                flat = weight[mine[0] : mine[-1] + 1].flatten(0, 1).to(x.dtype)
                found.append(functional.conv2d(one, flat, None, self.stride, kernel // 2))
        y = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return normalise(y, self.channels, gain, branches.routes, self.way, None if on is None else on.whole)


class Reducing(Family):
    """FactorizedReduce of every branch: relu, the even places to one half of the channels, the odd to the other, batch norm."""

    def __init__(self, group: Group, ops: Sequence[int], channels: int, stride: int, way: str) -> None:
        super().__init__(group, ops, channels, stride, way)
        self.even = _uniform((group.edges, channels // 2, channels), channels)
        self.odd = _uniform((group.edges, channels - channels // 2, channels), channels)

    def forward(self, x: Tensor, gain: Tensor, branches: Branches, on: On | None = None) -> Tensor:
        x = functional.relu(x)
        odd = functional.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))[:, :, 1::2, 1::2]
        halves = []
        for places, weight in ((x[:, :, ::2, ::2], self.even), (odd, self.odd)):
            inputs = places.reshape(x.shape[0], -1, self.channels, *places.shape[2:])
            each = inputs.index_select(1, branches.indices[branches.sources[0]]).flatten(1, 2)
            halves.append(multiply(each, self.picked(weight, branches)).unflatten(1, (branches.count, -1)))
        y = torch.cat(halves, dim=2).flatten(1, 2)
        return normalise(y, self.channels, gain, branches.routes, self.way, None if on is None else on.whole)


def _uniform(shape: tuple[int, ...], fan_in: int) -> nn.Parameter:
    """As torch initialises a convolution."""
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
