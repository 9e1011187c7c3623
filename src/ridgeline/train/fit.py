"""Train a model in place: the one loop of Ridgeline.

    fit(model, data, epochs=10) ──> History
      settings checked ──> model on its device, parts frozen ──> optimiser ──> checkpoint taken up, if there is one
      ──> for each Batch of feed.py: loop.py's step ──> history, progress, checkpoint

What fit sets for the run is as before when it ends, on an error too: TF32, the attention kernel, training modes, requires_grad,
torch's random state. Under torchrun the same call trains data-parallel. Every option is a field of options.TrainSettings, or below.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..core.errors import DataError, OptionError
from ..workload.data import Data, Split
from . import checkpoint as store
from .average import Average
from .evaluate import as_model, device_of
from .feed import Batch, batches
from .flops import peak_of
from .freeze import frozen
from .heads import Head, Loss, whole_loss
from .history import History, Recorder
from .loop import AfterStep, Loop, Objective
from .loss import cross_entropy
from .optimiser import Build, Schedule, build_optimiser
from .options import Scaling, TrainSettings, check_settings
from .parallel import World, average_buffers, join_world, share_model, synchronised_norms
from .precision import Precision, Watch
from .progress import Progress
from .seeds import epoch_order

_ATTENTION = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION"}
Source = Data | Split | tuple[Tensor, Tensor]


def fit(
    model: nn.Module, data: Source, loss: Loss | Mapping[str, Loss] | None = None, *,
    epochs: int | None = None, steps: int | None = None, batch: int = 128,
    optimiser: str | Build = "sgd", learning_rate: float = 0.1, rest_rate: float | None = None, momentum: float = 0.9,
    nesterov: bool = False, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 5e-4,
    decay: Literal["all", "matrices"] = "all", schedule: str | Schedule = "cosine", warmup: int = 0, rise: float = 0.3, final: float = 0.0,
    milestones: Sequence[float] = (0.5, 0.75), gamma: float = 0.1, smoothing: float = 0.0, average: float | None = None,
    precision: str = "float32", scaling: Scaling | None = None, clip: float | None = None, accumulate: int = 1,
    checkpoint_activations: bool = False, compile: bool | str = False, graph: bool = False, choose_kernels: bool = False, tf32: bool = True,
    attention: str = "auto",
    seed: int = 0, augment: bool = True, freeze: str | Sequence[str] = (), heads: Mapping[str, float | Head] | None = None,
    objective: Objective | None = None, after_step: AfterStep | None = None, device: torch.device | str | None = None, feed: str = "auto",
    checkpoint: Path | str | None = None, checkpoint_every: int | None = None, resume: bool = True,
    report: Callable[[str], None] | None = None, progress: bool = True, peak_flops: float | str | None = None,
) -> History:  # fmt: skip
    """Train `model` in place on the training split of `data`.

    loss(outputs, targets): default cross entropy over the last dimension. objective(model, inputs, targets) replaces forward and
    loss; one that is a Module is trained and stored along. after_step(model, step) runs after each optimiser step, from step 0.
    `batch` is what one optimiser step sees, whatever `accumulate` and the number of ranks; `device` None: where the model is.
    `checkpoint`: a folder, written every `checkpoint_every` steps (default: each epoch) and taken up if `resume`.
    `report` gets a line an epoch; `progress` shows a bar on stderr, with MFU where `peak_flops` (FLOP/s or a target) is known.
    """
    settings = check_settings(
        epochs=epochs, steps=steps, batch=batch, optimiser=optimiser if isinstance(optimiser, str) else "custom",
        learning_rate=learning_rate, rest_rate=rest_rate, momentum=momentum, nesterov=nesterov, betas=betas, weight_decay=weight_decay,
        decay=decay, schedule=schedule if isinstance(schedule, str) else "custom",
        warmup=warmup, rise=rise, final=final, milestones=tuple(milestones), gamma=gamma, smoothing=smoothing, average=average,
        precision=precision, scaling=scaling or Scaling(), clip=clip, accumulate=accumulate, checkpoint_activations=checkpoint_activations,
        compile=compile, graph=graph, choose_kernels=choose_kernels, tf32=tf32, attention=attention, seed=seed, augment=augment,
        freeze=(freeze,) if isinstance(freeze, str) else tuple(freeze), feed=feed,
    )  # fmt: skip
    if checkpoint_every is not None and (checkpoint_every < 1 or checkpoint is None):
        raise OptionError(
            f"checkpoint_every = {checkpoint_every}", why="needs a folder and at least 1 step", do="give checkpoint= a folder"
        )
    if objective is not None and (loss is not None or heads is not None):
        raise OptionError("objective with loss or heads", why="an objective replaces both", do="give one of them")
    if smoothing and (objective is not None or loss is not None):
        raise OptionError(f"smoothing = {smoothing} with a loss of your own", why="it is of the built-in loss", do="smooth in your loss")
    whole, source = whole_loss(partial(cross_entropy, smoothing=smoothing) if smoothing else loss, heads), as_data(data)
    place = torch.device(device) if device is not None else device_of(model)
    world = join_world(place.type)
    if place.type == "cuda" and (place.index is None or (device is None and world.size > 1)):
        place = torch.device("cuda", world.local_rank if world.size > 1 else torch.cuda.current_device())
    model.to(place)
    custom = (None if isinstance(optimiser, str) else optimiser, None if isinstance(schedule, str) else schedule)
    folder = None if checkpoint is None else Path(checkpoint)
    with _surroundings(model, settings, place), ExitStack() as stack:
        still = stack.enter_context(frozen(model, settings.freeze))
        notes = stack.enter_context(synchronised_norms(model, world, place))
        if settings.checkpoint_activations:
            from .recompute import checkpoint_activations as recomputing

            stack.enter_context(recomputing(model))
        loop = _build(model, source, settings, whole, objective, custom, place, world, still, peak_flops)
        loop.recorder.history.notes += notes
        if folder is not None:
            loop.identity = loop.describe(loss, heads)
            _take_up(loop, folder, resume, report)
        _train(loop, after_step, folder, checkpoint_every, report, progress and world.leads)
        if loop.average:
            loop.average.give()
        average_buffers(model, world)
        loop.optimiser.zero_grad(set_to_none=True)
    return loop.recorder.history


def as_data(given: Source) -> Data:
    """Data to train on from a data set, one split, or a pair of tensors."""
    split = given.train if isinstance(given, Data) else given if isinstance(given, Split) else Split(*given)
    if not len(split) or len(split.inputs) != len(split):
        raise DataError(
            f"{len(split.inputs)} inputs and {len(split)} targets",
            why="there must be a target for every input, and at least one",
            do="check the split",
        )
    return given if isinstance(given, Data) else Data("given", "tensors", 0, split, split)


def _build(
    model: nn.Module, data: Data, settings: TrainSettings, loss: Loss, objective: Objective | None,
    custom: tuple[Build | None, Schedule | None], device: torch.device, world: World, still: Sequence[nn.Module], peak: float | str | None,
) -> Loop:  # fmt: skip
    """The loop with its optimiser, precision and history, from rank 0's weights."""
    if settings.graph and (device.type != "cuda" or world.size > 1):
        raise OptionError(f"graph = True on {device}, {world.size} ranks", why="a CUDA graph is of one GPU", do="leave graph out")
    rows = len(data.train)
    batch = min(settings.batch, rows)
    if batch < world.size:
        raise OptionError(f"a batch of {batch} rows for {world.size} ranks", why="every rank needs a row", do="give a larger batch")
    share_model(model, world)
    named = [(f"model.{name}", parameter) for name, parameter in model.named_parameters()]
    if isinstance(objective, nn.Module):
        share_model(objective.to(device), world)
        own = {id(parameter) for _, parameter in named}
        named += [(f"objective.{name}", p) for name, p in objective.named_parameters() if id(p) not in own]
    made = build_optimiser(named, settings, custom[0])
    names = {parameter: name for name, parameter in named if parameter.requires_grad}
    history = History(batch, rows // batch)
    history.peak_flops = peak_of(peak, device, settings, world.size)
    called = model
    if settings.compile:
        mode = settings.compile if isinstance(settings.compile, str) else None
        called = cast(nn.Module, torch.compile(model, mode=mode))
    recorder = Recorder(history, device, Watch(settings.scaling.dynamic))
    total = settings.steps or history.steps_per_epoch * cast(int, settings.epochs)
    passes = Precision(settings, device, list(names))
    average = Average(model, settings.average) if settings.average else None
    return Loop(
        model,
        called,
        data,
        settings,
        total,
        batch,
        loss,
        objective,
        custom[1],
        made,
        names,
        passes,
        recorder,
        world,
        device,
        still,
        average,
    )


def _take_up(loop: Loop, folder: Path, resume: bool, report: Callable[[str], None] | None) -> None:
    def say(message: str) -> None:
        loop.recorder.history.notes.append(message)
        if report and loop.world.leads:
            report(message)

    if resume:
        loop.restore(folder, say)
    elif loop.world.leads:
        store.clear(folder)


def _train(
    loop: Loop, after_step: AfterStep | None, folder: Path | None, every: int | None, report: Callable[[str], None] | None, shown: bool
) -> None:
    """Every step that is left."""
    history, recorder = loop.recorder.history, loop.recorder
    each, bar = history.steps_per_epoch, Progress(history, loop.total) if shown else None
    with closing(_feed(loop, len(history))) as source:
        for batch in source:
            recorder.add(loop.step(batch))
            if after_step:
                after_step(loop.model, batch.step)
            if loop.average:
                loop.average.update(batch.step)
            done = batch.step + 1
            if folder is not None and (done % (every or each) == 0 or done == loop.total):
                loop.save(folder)
            if done % each == 0 or done == loop.total:
                recorder.flush()
                if report and loop.world.leads:
                    report(history.epoch(batch.epoch).line())
            if bar:
                bar.show(last=done == loop.total)


def _feed(loop: Loop, start: int) -> Generator[Batch, None, None]:
    settings, data = loop.settings, loop.data
    yield from batches(
        data.train,
        lambda epoch: epoch_order(len(data.train), settings.seed, epoch),
        batch=loop.batch,
        steps=loop.total,
        start_step=start,
        device=loop.device,
        mode=settings.feed,
        augment=data.augment if settings.augment else None,
        prepare=lambda inputs: as_model(loop.model, data.prepare(inputs)),
        seed=settings.seed,
        rank=loop.world.rank,
        world=loop.world.size,
    )


@contextmanager
def _surroundings(model: nn.Module, settings: TrainSettings, device: torch.device) -> Iterator[None]:
    """Training mode and torch's settings for the run; as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    convolution, on_gpu = torch.backends.cudnn, device.type == "cuda"
    before = (convolution.allow_tf32, convolution.benchmark)
    products = torch.get_float32_matmul_precision() if on_gpu else ""  # of the GPU and the CPU alike: one of them alone must not be set
    backend = getattr(SDPBackend, _ATTENTION[settings.attention]) if settings.attention != "auto" else None
    try:
        if on_gpu:
            torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
        convolution.allow_tf32 = settings.tf32
        convolution.benchmark = settings.choose_kernels or convolution.benchmark
        model.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), sdpa_kernel(backend) if backend else nullcontext():
            yield
    finally:
        if on_gpu:
            torch.set_float32_matmul_precision(products)
        convolution.allow_tf32, convolution.benchmark = before
        for module, mode in modes:
            module.training = mode
