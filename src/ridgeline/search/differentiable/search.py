"""Architecture search by gradient: weights on one half of the training data, the architecture on the other, in turn.

    data.train ──cut by the seed──> halves ──a batch of each a step──> architecture step (Adam), then weight step (SGD, cosine)
      order 1  ∇a Lv(w, a)            order 2  through one unrolled weight step (gradient.py)            + device term (terms.py)
    each epoch: scores [edges, ops], skips, eigenvalue ──guard.check──> go on, or stop ──> derive(scores of the epoch the guard names)

    search_differentiable(space, data, epochs=…) ──> Searched(point, history, stopped)
The first `warmup` share of the epochs trains weights alone. Everything random follows from (seed, step). With `folder` each epoch ends
with a checkpoint (safetensors and JSON, whole or absent): a killed run goes on from it and ends with the same bits on a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import DataError, OptionError
from ...train import checkpoint as store
from ...train.checkpoint import Snapshot
from ...train.feed import Batch
from ...train.precision import bad_loss
from ...train.seeds import mix, seed_step
from ...workload.data import Data
from ..spaces.space import Point, Space
from ..supernet.architecture import Temperature
from ..supernet.measures import measure_shares
from ..supernet.network import Supernet, make_supernet
from . import guard as guards
from .derive import Limit, Matrix, cell_space, derive, scores_of, skip_count
from .gradient import METHODS, Method, dominant_eigenvalue
from .guard import Guard, Stop
from .halves import ARCHITECTURE, BUILD, WEIGHTS, cut, feed, passes_in, place_of
from .skip_dropout import DroppedSkips, drop_skips_
from .steps import Rates, Steps
from .terms import Costs, DeviceTerm

REACH = 6.0  # how far Adam can move a logit in a whole search: DARTS's own 3e-4 over its 50 epochs
CURVED_ROWS = 64  # of the architecture's half, that the eigenvalue is taken on
FINAL = 0.04  # of the weights' learning rate, where cosine ends


@dataclass(frozen=True, slots=True)
class Searched:
    """An architecture, what each epoch was like, and why the search ended before its last epoch ("" where it did not)."""

    point: Point
    history: list[dict[str, Any]]
    stopped: str
    scores: Matrix  # [edges, ops] the point was derived from


@dataclass(slots=True)
class _Run:
    """A search with everything it needs."""

    space: Space
    supernet: Supernet
    steps: Steps
    weights: Data
    held: Data
    guard: Guard
    batch: int
    epochs: int
    each: int  # steps an epoch
    warm: int  # epochs
    seed: int
    device: torch.device
    method: Method | None
    dropped: DroppedSkips | None
    history: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Matrix] = field(default_factory=list)
    stop: Stop | None = None


def search_differentiable(
    space: Space, data: Data, *, device: torch.device | str = "cpu", epochs: int = 10, batch: int = 64, order: int = 1, policy: str = "all",
    guard: Guard | None = None, costs: Costs | None = None, cost_weight: float = 0.0, limit: Limit | None = None,
    precision: str | None = None, method: Method | None = None, learning_rate: float | None = None,
    architecture_rate: float | None = None, warmup: float = 0.2, seed: int = 0, seconds: float | None = None,
    folder: Path | str | None = None, resume: bool = True, report: Callable[[str], None] | None = None, **supernet: Any,
) -> Searched:  # fmt: skip
    """Search a cell space (darts, nb201) by gradient; further options are make_supernet's.

    costs [edges, ops] with cost_weight: see terms.DeviceTerm. limit: the derived network keeps it. method: how second derivatives are
    taken, by default exactly where every op of the supernet allows it, else by difference. architecture_rate defaults to 6 / steps, at
    least 3e-4; learning_rate to 0.025 · batch / 64, at most 0.2. `seconds` ends the search after the epoch in which they have passed.
    """
    place, began, guard = place_of(device), time.perf_counter(), guard or Guard()
    precision = passes_in(precision, place)
    _check(space, data, epochs, order, method, warmup)
    weights, held = cut(data, 0.5, seed, place)
    batch = min(batch, len(weights.train), len(held.train))
    each = min(len(weights.train), len(held.train)) // batch
    net = make_supernet(space, policy=policy, seed=mix(seed, BUILD), **supernet).to(place)
    dropped = drop_skips_(net, guard.skip_dropout, seed).to(place) if guard.skip_dropout else None
    warm = min(round(warmup * epochs), epochs - 1)
    rates = Rates(learning_rate or min(0.025 * batch / 64, 0.2), architecture_rate or min(max(REACH / (each * (epochs - warm)), 3e-4), 0.1))
    shape = cast(tuple[int, int], tuple(net.architecture.weights.shape))
    term = DeviceTerm(costs, cost_weight, shape, place) if costs is not None else None
    steps = Steps(net, rates, order=order, method=method or "exact", term=term, precision=precision)
    run = _Run(space, net, steps, weights, held, guard, batch, epochs, each, warm, seed, place, method, dropped)
    home, say = None if folder is None else Path(folder), report or (lambda _: None)
    identity = _identity(run, data, policy, order, precision, rates, cost_weight if term else 0.0, supernet)
    if home is not None:
        _take_up(run, home, identity, resume, say)
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        _train(run, home, identity, seconds, began, say)
    chosen = run.scores[run.stop.epoch if run.stop else -1]
    point = derive(space, chosen, skips=guard.skips, limit=limit)
    return Searched(point, run.history, run.stop.reason if run.stop else "", chosen)


def _train(run: _Run, home: Path | None, identity: dict[str, Any], seconds: float | None, began: float, say: Callable[[str], None]) -> None:
    """Every epoch that is left."""
    if run.stop is not None:
        return
    if run.method is None and (run.steps.order == 2 or run.guard.rise is not None):
        run.steps.method = _working_method(run, say)
    feeds = [
        feed(
            part,
            batch=run.batch,
            steps=run.each * run.epochs,
            start_step=run.each * len(run.history),
            seed=mix(run.seed, which),
            device=run.device,
        )
        for part, which in ((run.weights, WEIGHTS), (run.held, ARCHITECTURE))
    ]
    for epoch in range(len(run.history), run.epochs):
        start = time.perf_counter()
        facts = _epoch(run, epoch, feeds)
        run.history.append({"epoch": epoch, **facts, "seconds": time.perf_counter() - start})
        searched = run.history[run.warm :]  # before that the weights are their random start
        watched = [entry["eigenvalue"] for entry in searched if entry["eigenvalue"] is not None]
        stop = guards.check(run.guard, [entry["skips"] for entry in searched], watched) if searched else None
        if stop is not None:
            run.stop = Stop(stop.reason, stop.epoch + run.warm)
        elif seconds is not None and time.perf_counter() - began > seconds and epoch + 1 < run.epochs:
            run.stop = Stop(f"time: {seconds:g} s were over after {epoch + 1} epochs", epoch)
        say(_line(run))
        if home is not None:
            store.save(home, _snapshot(run, identity))
        if run.stop is not None:
            say(f"stopped: {run.stop.reason}; the architecture of epoch {run.stop.epoch + 1} is kept")
            return


def _epoch(run: _Run, epoch: int, feeds: list[Iterator[Batch]]) -> dict[str, Any]:
    """Its steps, then what the guard needs to know."""
    net, search = run.supernet, epoch >= run.warm
    total = run.each * run.epochs
    temperature = Temperature(steps=max(total, 1))
    losses = torch.zeros(2, device=run.device)
    net.train()
    if epoch == run.warm or not epoch:
        run.steps.restart(run.each * epoch)
    for step in range(run.each * epoch, run.each * (epoch + 1)):
        seed_step(run.seed, step, 0, run.device)
        run.steps.set_rate(run.steps.rates.learning_rate * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * step / total)) / 2))
        if net.policy == "sample":
            net.architecture.set_temperature(temperature.at(step))
        if run.dropped is not None:
            run.dropped.draw(step)
        train, valid = (next(source) for source in feeds)
        losses += torch.stack(run.steps(train, valid, search=search))
    if run.dropped is not None:
        run.dropped.gain.fill_(1.0)
    run.scores.append(_scores(net))
    point = derive(run.space, run.scores[-1])
    train_loss, valid_loss = (losses / run.each).tolist()
    if not math.isfinite(train_loss + valid_loss):
        raise bad_loss(run.each * (epoch + 1), train_loss + valid_loss)
    entropy = float(measure_shares(net.architecture.weights.detach()).entropy.mean())
    watched = run.guard.rise is not None and search
    return {
        "train_loss": train_loss, "valid_loss": valid_loss if search else None, "entropy": entropy, "skips": skip_count(run.space, point),
        "eigenvalue": _eigenvalue(run, run.guard.iterations) if watched else None, "skipped_share": net.skipped_share, "point": list(point),
    }  # fmt: skip


def _eigenvalue(run: _Run, iterations: int, method: Method | None = None) -> float:
    """Of the validation loss on the same batch each epoch, all ops computed, in float32."""
    rows = run.held.train
    count = min(CURVED_ROWS, len(rows))
    batch = Batch(run.held.prepare(rows.inputs[:count].to(run.device)), rows.targets[:count].to(run.device), 0.0, 0, 0)
    steps, weights = run.steps, [run.supernet.architecture.weights]
    with _all_ops(run.supernet):
        return dominant_eigenvalue(lambda: steps.loss(batch, "float32"), weights, iterations=iterations, method=method or steps.method)


def _working_method(run: _Run, say: Callable[[str], None]) -> Method:
    """Exact second derivatives where all ops have them; tried once."""
    try:
        _eigenvalue(run, 1, "exact")
    except (RuntimeError, NotImplementedError) as error:
        say(f"second derivatives by difference: {str(error).splitlines()[0]}")
        return "difference"
    return "exact"


@contextmanager
def _all_ops(net: Supernet) -> Iterator[None]:
    """Curvature is that of the whole mixture, whatever part of it the steps compute."""
    policy, draws, active, skipped = net.policy, net.draws, net._active, net.skipped_share
    net.policy = "all" if policy in ("sample", "top_k") else policy
    try:
        yield
    finally:
        net.policy, net.draws, net._active, net.skipped_share = policy, draws, active, skipped


def _scores(net: Supernet) -> Matrix:
    edges = net.architecture.edge_shares().detach().double().cpu().numpy() if net.architecture.edge_weights is not None else None
    return scores_of(net.architecture.weights.detach().double().cpu().numpy(), edges)


def _check(space: Space, data: Data, epochs: int, order: int, method: str | None, warmup: float) -> None:
    cells = cell_space(space)
    wrong = [
        (epochs < 1, f"epochs = {epochs}", "a search has one or more", "give e.g. 10"),
        (order not in (1, 2), f"order = {order}", "it is 1 or 2", "give 1, or 2 for unrolled steps"),
        (method not in (None, *METHODS), f"method = {method!r}", f"it is one of {', '.join(METHODS)}", "leave it out, or choose one"),
        (not 0 <= warmup < 1, f"warmup = {warmup}", "it is a share of the epochs below 1", "give e.g. 0.2"),
    ]
    for is_wrong, what, why, do in wrong:
        if is_wrong:
            raise OptionError(what, why=why, do=do)
    shape = tuple(data.train.inputs.shape[1:])
    if data.kind != "image" or shape != tuple(space.input_shape) or data.classes != cells.classes:
        raise DataError(
            f"{data.name}: {list(shape)}, {data.classes} classes, for a space of {list(space.input_shape)}, {cells.classes} classes",
            why="the supernet takes the space's images", do="give load_space image=, image_channels= and classes= of the data",
        )  # fmt: skip


def _identity(
    run: _Run, data: Data, policy: str, order: int, precision: str, rates: Rates, cost_weight: float, supernet: dict[str, Any]
) -> dict[str, Any]:
    return {
        "space": run.space.genotype(derive(run.space, _scores(run.supernet)))["settings"] | {"name": run.space.name}, "data": data.name,
        "rows": len(data.train), "epochs": run.epochs, "batch": run.batch, "order": order, "policy": policy, "precision": precision,
        "rates": asdict(rates), "guard": run.guard.to_json(), "warm": run.warm, "cost_weight": cost_weight, "seed": run.seed,
        "supernet": {name: value for name, value in sorted(supernet.items()) if name not in ("checkpoint", "lean", "depthwise")},
    }  # fmt: skip


def _names(net: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in net.named_parameters()}


def _snapshot(run: _Run, identity: dict[str, Any]) -> Snapshot:
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in run.supernet.state_dict().items()}
    tensors["scores"] = torch.from_numpy(np.stack(run.scores))
    facts: dict[str, Any] = {"identity": identity, "history": run.history, "method": run.steps.method}
    facts["stop"] = asdict(run.stop) if run.stop else None
    for name, optimiser in (("weights", run.steps.of_weights), ("architecture", run.steps.of_architecture)):
        found, facts[name] = store.pack_optimiser(optimiser, _names(run.supernet))
        tensors |= {f"{name}.{key}": value for key, value in found.items()}
    return Snapshot(len(run.history) * run.each, tensors, facts)


def _take_up(run: _Run, home: Path, identity: dict[str, Any], resume: bool, say: Callable[[str], None]) -> None:
    """The newest whole checkpoint, if there is one."""
    if not resume:
        store.clear(home)
    found = store.newest(home, say)
    if found is None:
        return
    store.check_same(found.facts["identity"], identity, home)

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in found.tensors.items() if name.startswith(prefix)}

    run.supernet.load_state_dict(part("model."))
    for name, optimiser in (("weights", run.steps.of_weights), ("architecture", run.steps.of_architecture)):
        store.unpack_optimiser(optimiser, _names(run.supernet), part(f"{name}."), found.facts[name])
    run.history, run.scores = list(found.facts["history"]), list(found.tensors["scores"].numpy())
    run.steps.restart(run.each * len(run.history))
    run.stop = Stop(**found.facts["stop"]) if found.facts["stop"] else None
    run.method = run.steps.method = found.facts["method"]
    say(f"resumed after epoch {len(run.history)} of {run.epochs}")


def _line(run: _Run) -> str:
    last = run.history[-1]
    parts = [f"epoch {last['epoch'] + 1}/{run.epochs}", f"training loss {last['train_loss']:.3f}"]
    parts += [f"validation loss {last['valid_loss']:.3f}"] if last["valid_loss"] is not None else ["weights alone"]
    parts += [f"entropy {last['entropy']:.2f}", f"{last['skips']} skips"]
    parts += [f"eigenvalue {last['eigenvalue']:.3g}"] if last["eigenvalue"] is not None else []
    return ", ".join([*parts, f"{last['seconds']:.1f} s"])
