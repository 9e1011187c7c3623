"""aso-se: search and grow in turns, four phases a cycle.

    warm-up   one stage's edges opened to all ops (cycle 0: every stage's); weights only, shares fixed
              until a round's training loss fell by less than `warm_settled` (5 %)
    search    architecture and weights in turn, first order, on two parts of the training data
              until a round changes no edge's choice ──> closed: the largest share an edge, at most `free_ops` without weights a stage
    grow      wider, deeper or a branch, function preserved (growth.py says which); the change of the logits is measured and journalled
    optimise  weights only, cosine rounds, until a round's validation loss fell by less than `optimise_settled` (1 %)

    run_cycles(space, data, cycles=15, batch=128, channels=32, depth=4) ──> Grown(model, genotype, phases, accuracy)
Every phase also ends after its `…_rounds`. With `folder` each finished phase is a checkpoint: a killed run goes on after the last one and
ends with the same bits on a CPU. The test split is not touched; train/ and recipe.py train the result to its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import OptionError
from ...core.files import write_json
from ...train import checkpoint as store
from ...train.checkpoint import Snapshot
from ...train.evaluate import Scores, evaluate
from ...train.fit import fit
from ...train.precision import bad_loss
from ...train.seeds import mix, seed_step
from ...workload.data import Data
from ..spaces.ops import make_op, op_names
from ..spaces.space import Space
from . import growth
from .grown import EDGES, STAGES, GrownNet, Plan, close_stages, open_stages, plan_from_json
from .growth import Limits, Record
from .halves import ARCHITECTURE, BUILD, WEIGHTS, cut, feed, passes_in, place_of

PHASES = ("warm-up", "search", "grow", "optimise")
JOURNAL = "phases.json"
SCORED_ROWS, SCORED_BATCH = 4096, 512  # of the architecture's part, at the end of a phase


@dataclass(frozen=True, slots=True)
class CycleSettings:
    """When a phase ends, and how it trains."""

    round_steps: int = 50
    warm_rounds: int = 2
    search_rounds: int = 3
    optimise_rounds: int = 4
    warm_settled: float = 0.05
    optimise_settled: float = 0.01
    head_start: float = 0.5  # share of an edge's own op when its stage is opened again
    free_ops: int = 2  # edges of a cell whose op has no weights: skips and pools
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    architecture_reach: float = 4.0  # how far Adam can move a logit in a whole search phase
    held_out: float = 0.2  # of the training rows: decides the architecture and the growth

    def __post_init__(self) -> None:
        counts = (self.round_steps, self.warm_rounds, self.search_rounds, self.optimise_rounds)
        if any(type(count) is not int or count < 1 for count in counts) or not 0 < self.head_start < 1 or self.free_ops < 0:
            raise OptionError(f"{self}", why="rounds and steps are 1 or more, shares between 0 and 1", do="change it")


@dataclass(frozen=True, slots=True)
class Grown:
    """A network that was searched and grown, with its weights; `genotype` rebuilds its modules (grown.plan_from_json, GrownNet)."""

    model: nn.Module
    genotype: dict[str, Any]
    phases: list[dict[str, Any]]
    accuracy: float  # on the held-out part of the training split
    parameters: int


@dataclass(slots=True)
class _Run:
    """What the phases share."""

    net: GrownNet
    ops: tuple[str, ...]
    weights: Data
    held: Data
    limits: Limits
    settings: CycleSettings
    batch: int
    cycles: int
    device: torch.device
    precision: str
    seed: int
    report: Callable[[str], None] | None
    until: float | None  # on time.perf_counter
    record: Record = field(default_factory=Record)
    phases: list[dict[str, Any]] = field(default_factory=list)

    def stream(self, *parts: int) -> int:
        """A seed for this place in the run."""
        return mix(self.seed, len(self.phases), *parts)

    @property
    def late(self) -> bool:
        return self.until is not None and time.perf_counter() > self.until


def run_cycles(
    space: Space, data: Data, *, cycles: int = 15, batch: int = 128, channels: int = 32, depth: int = 4, max_channels: int | None = None,
    max_depth: int | None = None, max_branches: int = STAGES, settings: CycleSettings | None = None, device: torch.device | str = "cpu",
    precision: str | None = None, seed: int = 0, seconds: float | None = None, folder: Path | str | None = None, resume: bool = True,
    report: Callable[[str], None] | None = None,
) -> Grown:  # fmt: skip
    """Search and grow a network of the space's ops.

    The limits of growth default to twice the channels and three times the depth (cells). Once `seconds` have passed, each phase ends
    after its round, and the next growth is the last and makes all that is left; such a run depends on the machine's speed.
    """
    settings, start = settings or CycleSettings(), time.perf_counter()
    limits = _limits(channels, depth, max_channels, max_depth, max_branches, cycles)
    place, ops = place_of(device), _ops(space)
    weights, held = cut(data, settings.held_out, seed, place)
    batch = min(batch, len(weights.train), len(held.train))
    with _seeded(mix(seed, BUILD), place):
        net = _placed(GrownNet(_first_plan(data, ops, channels, depth)), place)
    run = _Run(net, ops, weights, held, limits, settings, batch, cycles, place, passes_in(precision, place), seed, report,
               None if seconds is None else start + seconds)  # fmt: skip
    home = None if folder is None else Path(folder)
    identity = _identity(run, space, data)
    if home is not None:
        _take_up(run, home, identity, resume)
    steps = (_warm_up, _search, _grow, _optimise)
    while len(run.phases) < run.cycles * len(PHASES):
        number = len(run.phases)
        facts = steps[number % len(PHASES)](run)
        run.phases.append({"cycle": number // len(PHASES), "phase": PHASES[number % len(PHASES)], **facts})
        _journal(run, home, identity)
    scores = _score(run)
    parameters = sum(p.numel() for p in run.net.parameters())
    return Grown(run.net, run.net.plan.to_json(), run.phases, scores.accuracy, parameters)


def _ops(space: Space) -> tuple[str, ...]:
    """The space's ops, without none: every edge of a grown network does something."""
    found = dict.fromkeys(
        choice for decision in space.decisions for choice in decision.choices if choice in op_names() and choice != "none"
    )
    ops = tuple(found)
    if sum(not _free(op) for op in ops) < 1 or len(ops) < 2:
        raise OptionError(f"space {space.name} for aso-se", why="it has no edges with ops to choose from", do="use nb201 or darts")
    return ops


def _free(op: str) -> bool:
    return not any(True for _ in make_op(op, 8, 8).parameters())


def _first_plan(data: Data, ops: tuple[str, ...], channels: int, depth: int) -> Plan:
    first = next(op for op in ops if not _free(op))
    cells = tuple((depth + stage) // STAGES for stage in range(STAGES))
    return Plan(channels, cells, ((((first,),) * len(EDGES)),) * STAGES, data.classes, int(data.train.inputs.shape[1]))


def _limits(channels: int, depth: int, max_channels: int | None, max_depth: int | None, branches: int, cycles: int) -> Limits:
    if min(channels, cycles) < 1 or depth < STAGES:
        why = f"cycles and channels are 1 or more, depth {STAGES} or more: there are {STAGES} stages of a cell or more"
        raise OptionError(f"{cycles} cycles, {channels} channels, depth {depth}", why=why, do="give more")
    return Limits(channels, depth, max(max_channels or 2 * channels, channels), max(max_depth or 3 * depth, depth), max(branches, 0))


def _warm_up(run: _Run) -> dict[str, Any]:
    """Open a stage and train weights until the loss settles."""
    cycle, settings = len(run.phases) // len(PHASES), run.settings
    stages = tuple(range(STAGES)) if cycle == 0 else ((cycle - 1) % STAGES,)
    start = settings.head_start if cycle else 1.0 / len(run.ops)
    with _seeded(run.stream(BUILD), run.device):
        open_stages(run.net, stages, run.ops, head_start=start, seed=run.stream(ARCHITECTURE))
    _placed(run.net, run.device)
    losses: list[float] = []
    for number in range(settings.warm_rounds):
        losses.append(_fit_round(run, number, "constant"))
        if run.late or (len(losses) > 1 and losses[-2] - losses[-1] < settings.warm_settled * losses[-2]):
            break
    return _told(run, {"stages": list(stages), "rounds": len(losses), "train_loss": losses[-1]})


def _search(run: _Run) -> dict[str, Any]:
    """Architecture and weights in turn; close the stage with what was chosen."""
    settings, net = run.settings, run.net
    assert net.mixture is not None
    total = settings.round_steps * settings.search_rounds
    rate = settings.architecture_reach / total
    optimisers = (
        torch.optim.Adam([net.mixture], rate, betas=(0.5, 0.999)),
        torch.optim.SGD(net.weight_parameters(), settings.learning_rate, momentum=0.9, weight_decay=settings.weight_decay, nesterov=True),
    )
    feeds = [
        feed(part, batch=run.batch, steps=total, start_step=0, seed=run.stream(which), device=run.device)
        for part, which in ((run.held, ARCHITECTURE), (run.weights, WEIGHTS))
    ]
    before, rounds = None, 0
    net.train()
    for rounds in range(1, settings.search_rounds + 1):
        for step in range((rounds - 1) * settings.round_steps, rounds * settings.round_steps):
            seed_step(run.stream(), step, 0, run.device)
            for optimiser, batches in zip(optimisers, feeds, strict=True):
                batch = next(batches)
                _alternate(run, optimiser, batch.inputs, batch.targets)
        chosen = _chosen(_without_doubles(net, run.ops), run.ops, settings.free_ops)
        if chosen == before or run.late:
            break
        before = chosen
    shares = net.mixture.detach().softmax(-1).cpu()
    if not bool(shares.isfinite().all()):
        raise bad_loss(total, float("nan"))
    run.record.shares.update({str(stage): rows.tolist() for stage, rows in zip(net.open_stages, shares, strict=True)})
    stages = list(net.open_stages)
    close_stages(net, run.ops, chosen)
    edges = {str(stage): [list(ops) for ops in net.plan.edges[stage]] for stage in stages}
    return _told(run, {"stages": stages, "rounds": rounds, "edges": edges})


def _alternate(run: _Run, optimiser: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    """One step of one of the two, gradients for its parameters alone."""
    parameters = optimiser.param_groups[0]["params"]
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.precision == "bfloat16"):
        loss = functional.cross_entropy(run.net(inputs).float(), targets)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(parameters, 5.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def _without_doubles(net: GrownNet, ops: tuple[str, ...]) -> Tensor:
    """The mixture, less the ops a growth has set beside an edge's own already."""
    assert net.mixture is not None
    logits = net.mixture.detach().cpu().clone()
    for row, stage in enumerate(net.open_stages):
        for edge, names in enumerate(net.plan.edges[stage]):
            logits[row, edge, [ops.index(name) for name in names[1:]]] = float("-inf")
    return logits


def _chosen(mixture: Tensor, ops: tuple[str, ...], budget: int) -> list[list[int]]:
    """The largest share of each edge; where too many ops are without weights, those give way that lose least by it."""
    logs, free = mixture.detach().log_softmax(-1).cpu().double(), torch.tensor([_free(op) for op in ops])
    found = []
    for rows in logs:  # [edges, ops]
        best, (with_weights, heavy) = rows.argmax(-1), rows.masked_fill(free, float("-inf")).max(-1)
        losses = [
            (float(rows[edge, best[edge]] - with_weights[edge]), edge)
            for edge in range(len(rows))
            if free[best[edge]] and math.isfinite(with_weights[edge])
        ]
        for _, edge in sorted(losses)[: max(len(losses) - budget, 0)]:
            best[edge] = heavy[edge]
        found.append([int(op) for op in best])
    return found


def _grow(run: _Run) -> dict[str, Any]:
    """As many growths as the cycles left ask for, each of the kind growth.choose names."""
    cycle = len(run.phases) // len(PHASES)
    if run.late:
        run.cycles = cycle + 1
    left = run.cycles - cycle
    count = -(-growth.missing(run.net, run.limits) // left)
    probe = run.held.prepare(run.held.train.inputs[:64].to(run.device))
    before, work = _logits(run.net, probe), _work(run.net)
    done: list[str] = []
    kinds: list[str] = []
    limits = run.limits
    while len(done) < count and (kind := growth.choose(run.net, limits, run.record.gains)) is not None:
        with _seeded(run.stream(BUILD, len(done)), run.device):
            made = growth.grow(run.net, kind, limits, run.record, run.ops, run.stream(len(done)))
        if made is None:  # no edge is left for a branch
            limits = replace(limits, branches=growth.branches_of(run.net))
            continue
        run.net, told = made
        done.append(told)
        kinds.append(kind)
    _placed(run.net, run.device)
    change = float((_logits(run.net, probe) - before).abs().max() / before.abs().max().clamp(min=1e-12))
    facts = {"growth": done, "kinds": kinds, "work": _work(run.net) / work, "function_change": change}
    return _told(run, {**facts, "channels": run.net.plan.channels, "cells": list(run.net.plan.cells)})


def _optimise(run: _Run) -> dict[str, Any]:
    """Train weights until the validation loss settles; what the last growth gained is now known."""
    grown, settings, losses = run.phases[-1], run.settings, [run.phases[-1]["valid_loss"]]
    before = run.phases[-len(PHASES)]["valid_loss"] if len(run.phases) >= len(PHASES) else losses[0]
    for number in range(settings.optimise_rounds):
        train_loss = _fit_round(run, number, "cosine")
        losses.append(_score(run).loss)
        if run.late or (number and losses[-2] - losses[-1] < settings.optimise_settled * losses[-2]):
            break
    for kind in grown["kinds"]:
        run.record.gains[kind] = (before - losses[-1]) / max(grown["work"] - 1.0, 1e-3)
    return _told(run, {"rounds": len(losses) - 1, "train_loss": train_loss})


def _fit_round(run: _Run, number: int, schedule: str) -> float:
    """Train the weights for a round; its mean training loss."""
    settings = run.settings
    history = fit(
        run.net, run.weights, steps=settings.round_steps, batch=run.batch, learning_rate=settings.learning_rate, nesterov=True, clip=5.0,
        weight_decay=settings.weight_decay, schedule=schedule, precision=run.precision, seed=run.stream(WEIGHTS, number), device=run.device,
        freeze=("mixture",) if run.net.mixture is not None else (), progress=False,
    )  # fmt: skip
    return sum(history.loss) / len(history.loss)


def _score(run: _Run) -> Scores:
    return evaluate(run.net, run.held, batch=SCORED_BATCH, limit=min(SCORED_ROWS, len(run.held.test)))


def _told(run: _Run, facts: dict[str, Any]) -> dict[str, Any]:
    scores = _score(run)
    return {**facts, "valid_loss": scores.loss, "valid_accuracy": scores.accuracy}


def _logits(net: GrownNet, inputs: Tensor) -> Tensor:
    """In evaluation mode and full float32: TF32 alone would show as a change of 1e-3."""
    mode, convolution = net.training, torch.backends.cudnn
    tf32, convolution.allow_tf32 = convolution.allow_tf32, False
    net.eval()
    with torch.no_grad():
        found: Tensor = net(inputs).double()
    net.train(mode)
    convolution.allow_tf32 = tf32
    return found


def _work(net: GrownNet) -> int:
    """Multiplications of the convolutions, up to a constant: each stage has a quarter of the places of the one before."""
    total = 0
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            stage = int(name.split(".")[1]) if name.startswith("stages.") else 0
            total += module.weight.numel() >> (2 * stage)
    return total


def _placed(net: GrownNet, device: torch.device) -> GrownNet:
    return net.to(device, memory_format=torch.channels_last) if device.type == "cuda" else net.to(device)  # type: ignore[call-overload]


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Fresh weights that depend on the seed alone; torch's generators as before afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _identity(run: _Run, space: Space, data: Data) -> dict[str, Any]:
    return {
        "space": space.name, "ops": list(run.ops), "data": data.name, "rows": len(data.train), "settings": asdict(run.settings),
        "limits": asdict(run.limits), "batch": run.batch, "cycles": run.cycles, "precision": run.precision, "seed": run.seed,
    }  # fmt: skip


def _journal(run: _Run, home: Path | None, identity: dict[str, Any]) -> None:
    """One finished phase: said, and stored whole."""
    last = run.phases[-1]
    if run.report:
        what = "; ".join(last.get("growth", [])) or f"{last.get('rounds', 0)} rounds"
        run.report(f"cycle {last['cycle'] + 1}/{run.cycles} {last['phase']}: {what}, held-out accuracy {last['valid_accuracy']:.1%}")
    if home is not None:
        facts = {
            "identity": identity, "cycles": run.cycles, "plan": run.net.plan.to_json(), "open": list(run.net.open_stages),
            "phases": run.phases, "record": run.record.to_json(),
        }  # fmt: skip
        store.save(home, Snapshot(len(run.phases), run.net.state_dict(), facts))
        write_json(home / JOURNAL, run.phases)


def _take_up(run: _Run, home: Path, identity: dict[str, Any], resume: bool) -> None:
    """The newest whole checkpoint, if there is one."""
    if not resume:
        store.clear(home)
    found = store.newest(home, run.report or (lambda _: None))
    if found is None:
        return
    store.check_same(found.facts["identity"], identity, home)
    net = GrownNet(plan_from_json(found.facts["plan"]))
    if found.facts["open"]:
        open_stages(net, found.facts["open"], run.ops, head_start=0.5, seed=0)
    net.load_state_dict(dict(found.tensors))
    run.net, run.phases = _placed(net, run.device), list(found.facts["phases"])
    run.record, run.cycles = Record(**found.facts["record"]), int(found.facts["cycles"])
    if run.report:
        run.report(f"resumed after phase {len(run.phases)} of {run.cycles * len(PHASES)}")
