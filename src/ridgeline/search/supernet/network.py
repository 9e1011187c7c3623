"""A supernet: every edge a mixed op, one tensor of architecture weights, four policies of what is computed.

    policy ──> shares [edges, ops], Active: the ops of every edge, known to Python ──> Frame ──> logits
      all      softmax of the weights, every op
      top_k    the same shares, only the k largest of an edge that are above the threshold; the rest count as zero and shares are not
               rescaled: an op dropped at 0.5 % changes the sum by 0.5 %, and the gradient of those kept is DARTS's for the same output
      sample   one op an edge, drawn on the host; its gain is 1 in value and carries the gradient (see `estimator`); in a captured step the
               masked form (draws.py), its cells always computed again in the backward pass
      partial  all, on 1/parts of the channels, with edge normalisation (PC-DARTS)
    evaluation: the largest op of each edge alone; `evaluate_all` keeps the training form

Estimators of `sample`. "straight_through": gain 1 + s - sg(s), s the Gumbel-softmax at the temperature (GDAS); biased: ops not drawn get
gradient through the softmax only. "score": gain p / sg(p), gradient <dL/dout, op(x)> ∇log p; unbiased for the expected loss where the loss
is linear in the output of each edge with the others fixed, a first-order form of the score function otherwise.
No result is kept between calls. Ref: Liu 2019, Dong 2019 (GDAS), Xu 2020 (PC-DARTS).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import OptionError, unknown_name
from ...kernel.depthwise import WAYS
from ..spaces.space import Point, Space
from .architecture import Architecture
from .batched import Indices
from .cells import Cells201Frame, DartsFrame, Frame
from .draws import Draw, make_draw
from .host import HostCopy
from .layout import Active
from .mixed import Plan, weigh

POLICIES = ("all", "top_k", "sample", "partial")
ESTIMATORS = ("straight_through", "score")
FRAMES: dict[str, type[Frame]] = {"darts": DartsFrame, "nb201": Cells201Frame}
Plans = dict[str, list[Plan]]


class Supernet(nn.Module):
    def __init__(
        self, space: Any, *, policy: str, k: int, threshold: float, checkpoint: bool, lean: bool, depthwise: str, estimator: str,
        seed: int, parts: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.space = space
        self.policy, self.k, self.threshold, self.checkpoint = policy, k, threshold, checkpoint
        self.estimator, self.seed, self.evaluate_all = estimator, seed, False
        frame: Any = FRAMES[space.name]
        options = {"lean": lean, "depthwise": depthwise, "parts": parts if policy == "partial" else 1}
        self.frame: Frame = frame(space, options)
        self.ops: tuple[str, ...] = space.ops
        targets = self.frame.edge_targets
        self.architecture = Architecture(len(targets), len(self.ops), targets=targets, normalise_edges=policy == "partial")
        self.draws = 0
        """Samples drawn so far: with the seed, all that the next depends on beside the weights."""
        self.skipped_share = 0.0
        """Of the multiply-adds of all ops of all edges, in the last training pass."""
        self._whole: Active = tuple(tuple(range(len(self.ops))) for _ in targets)
        self._active: Active | None = None
        self._host, self._host_top = HostCopy(lag=2), HostCopy(lag=1)
        self._plans: tuple[tuple[Active, torch.device], Plans] | None = None

    def forward(self, x: Tensor, drawn: Draw | Tensor | None = None) -> Tensor:
        """`drawn`, of `sample` in training: a draw made before, or [2, edges, ops] of `packed` ones on the device; None: one made now."""
        shares, active, chosen = self.choose(drawn)
        plans = self.plans(active, x.device)
        edges = self.architecture.edge_shares() if self.policy == "partial" else None
        if edges is not None:
            shares = shares * edges[:, None]
        found = {kind: [weigh(plan, shares, edges, chosen) for plan in of_kind] for kind, of_kind in plans.items()}
        recompute = self.training and (self.checkpoint or chosen is not None)  # results of ops not drawn would only take room
        logits: Tensor = self.frame(x, found, recompute)
        return logits

    def choose(self, drawn: Draw | Tensor | None = None) -> tuple[Tensor, Active, Tensor | None]:
        """(shares, what is computed, which of it the device may skip) of this pass."""
        architecture = self.architecture
        if not self.training and not self.evaluate_all:
            return torch.ones_like(architecture.weights), self.largest(), None
        if self.policy == "sample":
            if isinstance(drawn, Tensor):
                chosen, noise = drawn.unbind(0)
                return self.gains(noise) * chosen, self._whole, chosen
            drawn = self.sample() if drawn is None else drawn
            return self.gains(drawn.noise_like(architecture.weights)), drawn.active, None
        active = self.top() if self.policy == "top_k" else self._whole
        self._count(active)
        return architecture.shares(), active, None

    def draw(self) -> tuple[Tensor, Active]:
        """(gains, the op of each edge) of a new draw."""
        drawn = self.sample()
        return self.gains(drawn.noise_like(self.architecture.weights)), drawn.active

    def sample(self) -> Draw:
        """Gumbel-max on the host, from (seed, draws); the same noise goes to the device for the gradient."""
        drawn = make_draw(self._host.of(self.architecture.weights), self.seed, self.draws)
        self.draws += 1
        self._count(drawn.active)
        return drawn

    def gains(self, noise: Tensor) -> Tensor:
        """[edges, ops]: 1 in value for any op that can be drawn, with the estimator's gradient."""
        if self.estimator == "score":
            p = self.architecture.shares()
            return p / p.detach().clamp_min(torch.finfo(p.dtype).tiny)  # a share of 0 has gain and gradient 0, not 0 / 0
        soft = self.architecture.shares(noise=noise)
        return 1 + soft - soft.detach()

    def top(self) -> Active:
        """The choice of `refresh`; made now, waiting for the device, where there is none yet."""
        if self._active is None:
            self._active = self.top_of(self.architecture.weights.detach().double().cpu().numpy())
        return self._active

    def top_of(self, weights: np.ndarray[Any, Any]) -> Active:
        shares = np.exp(weights - weights.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        found = []
        for row in shares:
            ranked = sorted(range(len(row)), key=lambda column: (-row[column], column))
            kept = [column for column in ranked[: self.k] if row[column] >= self.threshold]
            found.append(tuple(sorted(kept or ranked[:1])))
        return tuple(found)

    def refresh(self, *, wait: bool = False) -> bool:
        """Choose the ops of top_k anew; True where they changed. Without `wait`, on CUDA from the weights as they were at the call
        before: no step waits for the device."""
        weights = self.architecture.weights
        known = weights.detach().double().cpu().numpy() if wait else self._host_top.of(weights)
        before, self._active = self._active, self.top_of(known)
        return before != self._active

    def largest(self) -> Active:
        """Of each edge, none left out where a net of the space cannot have it."""
        weights = self.architecture.weights.detach().double().cpu().numpy().copy()
        if self.space.name == "darts" and "none" in self.ops:
            weights[:, self.ops.index("none")] = -np.inf
        return tuple((int(column),) for column in weights.argmax(axis=1))

    def plans(self, active: Active, device: torch.device) -> Plans:
        """Index tensors of what is computed, sent in one copy. They depend on nothing but `active`; only the last are kept."""
        if self._plans is None or self._plans[0] != (active, device):
            indices = Indices()
            made: Plans = {}
            for kind, cell in self.frame.all_cells():
                if kind not in made:
                    made[kind] = [mixed.plan(active, indices) for mixed in cell.mixed]  # type: ignore[operator]
            indices.send(device)
            self._plans = ((active, device), made)
        return self._plans[1]

    def _count(self, active: Active) -> None:
        work = self.frame.work
        whole = sum(map(sum, work))
        self.skipped_share = 1 - sum(work[row][column] for row, of_row in enumerate(active) for column in of_row) / whole if whole else 0.0

    def derive(self) -> Point:
        """The point the weights say; waits for the device."""
        weights = self.architecture.weights.detach().double().cpu()
        if self.policy == "partial" and self.space.name == "darts":
            return self._derive_with_edges(torch.softmax(weights, 1) * self.architecture.edge_shares().detach().double().cpu()[:, None])
        point: Point = self.space.derive(weights.numpy())
        return point

    def _derive_with_edges(self, importance: Tensor) -> Point:
        """DARTS's rule on share times edge share."""
        real = importance[:, [column for column, name in enumerate(self.ops) if name != "none"]].numpy()
        edges, cells = self.space.edges, []
        for first in (0, len(edges)):
            nodes = []
            for target in sorted({target for _, target in edges}):
                into = [(source, first + row) for row, (source, to) in enumerate(edges) if to == target]
                kept = sorted(sorted(into, key=lambda edge: (-real[edge[1]].max(), edge[0]))[:2])
                nodes.append(tuple((source, int(real[row].argmax())) for source, row in kept))
            cells.append(nodes)
        point: Point = self.space.point(*cells)
        return point

    def expected_cost(self, costs: Tensor) -> Tensor:
        """Σ share x cost [edges, ops]: what the derived net is expected to cost, if ops were drawn by their shares."""
        return (self.architecture.shares() * costs.to(self.architecture.weights)).sum()

    def weight_parameters(self) -> Iterator[nn.Parameter]:
        return self.frame.parameters()

    def architecture_parameters(self) -> Iterator[nn.Parameter]:
        return self.architecture.parameters()

    def get_extra_state(self) -> Tensor:
        """A tensor, so that a state can be stored without pickle: draws, whether ops are chosen, and which [edges, ops]."""
        chosen = self._active or ()
        flags = [int(column in of_row) for of_row in chosen for column in range(len(self.ops))]
        return torch.tensor([self.draws, int(bool(chosen)), *(flags or [0] * len(self._whole) * len(self.ops))])

    def set_extra_state(self, state: Tensor) -> None:
        self.draws, chosen, *flags = (int(value) for value in state.tolist())
        width = len(self.ops)
        rows = [flags[at : at + width] for at in range(0, len(flags), width)]
        self._active = tuple(tuple(column for column, flag in enumerate(row) if flag) for row in rows) if chosen else None
        self._host, self._host_top = HostCopy(lag=2), HostCopy(lag=1)


def make_supernet(
    space: Space, *, policy: str = "all", channels: int | None = None, cells: int | None = None, k: int = 3, threshold: float = 0.01,
    checkpoint: bool = False, lean: bool = False, depthwise: str = "auto", estimator: str = "straight_through", seed: int = 0,
    parts: int = 4,
) -> Supernet:  # fmt: skip
    """Fresh weights from the seed. `lean` keeps less for the backward pass and computes it again (always so with Triton's depthwise)."""
    for kind, value, known in (("policy", policy, POLICIES), ("estimator", estimator, ESTIMATORS), ("depthwise", depthwise, WAYS)):
        if value not in known:
            raise unknown_name(kind, value, known, see="docs/search.md")
    if space.name not in FRAMES:
        raise OptionError(
            f"a supernet of space {space.name}",
            why=f"only {' and '.join(FRAMES)} have mixed ops",
            do="use a strategy that trains candidates",
        )
    given = {name: value for name, value in (("channels", channels), ("cells", cells)) if value is not None}
    space = dataclasses.replace(space, **given) if given else space  # type: ignore[type-var]
    if k < 1 or not 0 <= threshold < 1:
        raise OptionError(
            f"top_k with k = {k}, threshold = {threshold}", why="an edge needs an op", do="give k >= 1 and 0 <= threshold < 1"
        )
    if policy == "partial" and (parts < 2 or space.channels % (2 * parts)):  # type: ignore[attr-defined]
        raise OptionError(f"{parts} parts of {space.channels} channels", why="a part must be whole and even", do="e.g. 4 parts of 16")  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Supernet(space, policy=policy, k=k, threshold=threshold, checkpoint=checkpoint, lean=lean, depthwise=depthwise,
                        estimator=estimator, seed=seed, parts=parts)  # fmt: skip
