"""The mixed op: all edges of a group, each a sum over its ops weighted by their shares.

x [B, S*C, H, W], Weighed (plan, shares [edges, ops]) ──MixedOp──> [B, targets, C, H', W']: for each target the sum over sources and ops
  families (separable, dilated, dense, reducing)   batched over ops of one form and all edges, share = gain of the batch norm
  pools, identity                                  once a source: every edge that reads it has the same; one product with the shares
  ops users registered                             one module an edge, times its share

share of channels < 1 (PC-DARTS): the first C/k of every source go through the ops, the rest go by (stride 2: 2x2 max pool), and
channels are shuffled. Shuffling is the same for every edge, so it is done once, after the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..spaces.ops import make_op
from .batched import Branches, Dense, Family, Indices, On, Reducing, Separable, make_branches
from .layout import Group
from .mixing import normalise

SEPARABLE = {"sep_conv_3x3": 3, "sep_conv_5x5": 5}
DILATED = {"dil_conv_3x3": 3, "dil_conv_5x5": 5}
DENSE = {"conv3x3": 3, "conv1x1": 1}
SKIPS = ("skip_connect", "skip")
POOLS = ("max_pool_3x3", "avg_pool_3x3", "avgpool")


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a group is computed; made by `MixedOp.plan`, the same for all cells of a kind."""

    families: tuple[Branches, ...]
    pools: tuple[int, ...]
    """Columns of pools and identities that some edge has."""
    mask: slice | None
    """1 where an edge has a pool's or identity's column, [edges, pools]; None: everywhere."""
    single: tuple[tuple[int, int], ...]
    """(edge, column) of users' ops."""
    rows: slice
    """The architecture rows of the group's edges."""
    indices: Indices

    def of_rows(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.indices[self.rows])


@dataclass(frozen=True, slots=True)
class Weighed:
    """A plan with the shares of a pass, made once for all cells of a kind."""

    plan: Plan
    shares: Tensor
    """[edges, ops] of the group."""
    gains: tuple[Tensor, ...]
    """[branches] of each family."""
    edge_shares: Tensor | None
    """[edges], with parts: those of the channels that go by; `shares` has them already."""
    chosen: Tensor | None = None
    """[edges, ops] of the group, 0 for ops whose share is 0 and that need not be computed; None: Python knows them."""
    on: tuple[On | None, ...] = ()
    """The same for each family."""


def weigh(plan: Plan, shares: Tensor, edge_shares: Tensor | None, chosen: Tensor | None = None) -> Weighed:
    """Of the whole architecture's shares [rows, ops], edge shares [rows] and flags [rows, ops]."""
    mine = plan.of_rows(shares)
    gains = tuple(branches.gain(mine) for branches in plan.families)
    flags = None if chosen is None else plan.of_rows(chosen)
    on = tuple(None if flags is None else branches.on(flags) for branches in plan.families)
    return Weighed(plan, mine, gains, None if edge_shares is None else plan.of_rows(edge_shares), flags, on)


class MixedOp(nn.Module):
    def __init__(
        self, group: Group, ops: Sequence[str], channels: int, stride: int, *, normalise_pools: bool, parts: int = 1, lean: bool = False,
        depthwise: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.ops, self.stride, self.parts, self.depthwise = group, tuple(ops), stride, parts, depthwise
        self.channels = channels // parts
        self.whole_channels, self.normalise_pools = channels, normalise_pools
        families = self._families(lean, depthwise)
        self.families = nn.ModuleList(families)
        batched = {column for family in families for column in family.ops}
        self.shared = tuple(c for c, name in enumerate(ops) if name in POOLS or (name in SKIPS and c not in batched))
        known = batched | set(self.shared) | {c for c, name in enumerate(ops) if name == "none"}
        others = [(edge, column) for column in range(len(ops)) if column not in known for edge in range(group.edges)]
        made = {f"{edge}:{column}": without_statistics(make_op(ops[column], self.channels, self.channels, stride, False))
                for edge, column in others}  # fmt: skip
        self.single = nn.ModuleDict(made)

    def _families(self, lean: bool, way: str) -> list[Family]:
        def columns(names: Sequence[str]) -> list[int]:
            return [column for column, name in enumerate(self.ops) if name in names]

        found: list[Family] = []
        for table, dilation, twice in ((SEPARABLE, 1, True), (DILATED, 2, False)):
            if mine := columns(tuple(table)):
                kernels = [table[self.ops[column]] for column in mine]
                found.append(
                    Separable(self.group, mine, self.channels, self.stride, way, kernels, dilation=dilation, twice=twice, lean=lean)
                )
        found += [Dense(self.group, [column], self.channels, self.stride, way, DENSE[self.ops[column]]) for column in columns(tuple(DENSE))]
        if self.stride == 2:
            found += [Reducing(self.group, [column], self.channels, self.stride, way) for column in columns(SKIPS)]
        return found

    def plan(self, active: Sequence[Sequence[int]], indices: Indices) -> Plan:
        """`active`: for every architecture row its ops' columns."""
        mine = [active[row] for row in self.group.rows]
        families = tuple(make_branches(self.group, f.ops, len(self.ops), mine, indices) for f in self.families)  # type: ignore[arg-type]
        pools = tuple(column for column in self.shared if any(column in of_edge for of_edge in mine))
        flags = [int(column in of_edge) for of_edge in mine for column in pools]
        single = tuple((edge, column) for edge, of_edge in enumerate(mine) for column in of_edge if f"{edge}:{column}" in self.single)
        return Plan(families, pools, None if all(flags) else indices.add(flags), single, indices.add(self.group.rows), indices)

    def forward(self, x: Tensor, weighed: Weighed) -> Tensor:
        if self.parts == 1:
            return self.mixed(x, weighed)
        sources = x.unflatten(1, (len(self.group.sources), -1))
        mixed = self.mixed(sources[:, :, : self.channels].flatten(1, 2), weighed)
        rest = sources[:, :, self.channels :].flatten(1, 2)
        rest = functional.max_pool2d(rest, 2, 2, ceil_mode=True) if self.stride == 2 else rest
        assert weighed.edge_shares is not None
        passed = self.spread(rest, weighed.edge_shares[:, None])
        both = torch.cat((mixed, passed), dim=2)  # [B, T, C, H, W]
        shuffled: Tensor = both.unflatten(2, (self.parts, -1)).transpose(2, 3).flatten(2, 3)
        return shuffled

    def mixed(self, x: Tensor, weighed: Weighed) -> Tensor:
        """[B, targets, C, H', W']"""
        plan, shares = weighed.plan, weighed.shares
        targets = len(self.group.targets)
        sums: list[Tensor | None] = [None] * targets  # of single branches, by target
        total: Tensor | None = None
        for family, branches, gain, on in zip(self.families, plan.families, weighed.gains, weighed.on, strict=True):
            if not branches.count:
                continue
            total = _plus(total, family(x, gain, branches, on).unflatten(1, (targets, -1)))
        if plan.pools:
            total = _plus(total, self.pooled(x, shares, plan))
        for edge, column in plan.single:
            source = x.unflatten(1, (len(self.group.sources), -1))[:, self.group.source_place(edge)]
            one = self.single[f"{edge}:{column}"](source)
            if weighed.chosen is not None:  # whatever a user's op gives for inputs it was not drawn for
                one = torch.where(weighed.chosen[edge, column] != 0, one, 0.0)
            one = one * shares[edge, column].to(x.dtype)
            sums[self.group.target_place(edge)] = _plus(sums[self.group.target_place(edge)], one)
        if total is None or any(one is not None for one in sums):
            size = [-(-side // self.stride) for side in x.shape[2:]]
            zero = x.new_zeros(x.shape[0], self.channels, *size)
            lone = torch.stack([zero if one is None else one for one in sums], dim=1)
            total = _plus(total, lone)
        return total

    def pooled(self, x: Tensor, shares: Tensor, plan: Plan) -> Tensor:
        weights = torch.stack([shares[:, column] for column in plan.pools], dim=1)
        if plan.mask is not None:
            weights = weights * plan.indices[plan.mask].view_as(weights).to(weights.dtype)
        return self.spread(torch.cat([self.pool(x, self.ops[column]) for column in plan.pools], dim=1), weights)

    def pool(self, x: Tensor, name: str) -> Tensor:
        if name in SKIPS:
            return x
        if name == "max_pool_3x3":
            x = functional.max_pool2d(x, 3, self.stride, 1)
        else:
            x = functional.avg_pool2d(x, 3, self.stride, 1, count_include_pad=False)
        return normalise(x, self.channels, way=self.depthwise) if self.normalise_pools else x

    def spread(self, values: Tensor, weights: Tensor) -> Tensor:
        """values [B, kinds*S*C, H, W], weights [edges, kinds] -> [B, targets, C, H, W], each the weighted sum of what its sources have."""
        sources, targets, kinds = len(self.group.sources), len(self.group.targets), weights.shape[1]
        matrix = weights.view(sources, targets, kinds).permute(1, 2, 0).reshape(targets, kinds * sources).to(values.dtype)
        flat = values.reshape(values.shape[0], kinds * sources, -1)
        channels = values.shape[1] // (kinds * sources)
        return torch.matmul(matrix, flat).view(values.shape[0], targets, channels, *values.shape[2:])


def _plus(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


def without_statistics(module: nn.Module) -> nn.Module:
    """Batch norms that use their batch's statistics always."""
    for one in module.modules():
        if isinstance(one, nn.modules.batchnorm._BatchNorm):
            one.track_running_stats = False
            one.running_mean = one.running_var = one.num_batches_tracked = None
    return module
