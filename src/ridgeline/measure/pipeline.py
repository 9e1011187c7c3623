"""The whole way of a sample, stage by stage: is it the model that binds?

    .npy files ──load──> host arrays ──preprocess──> input tensor ──host copy──> device ──model──> output ──postprocess──> answers
      images   uint8 [H, W, C]   → float [B, C, H, W], normalised                       → softmax, top 5
      text     UTF-8 bytes       → byte tokens, cut and padded to [B, T]                → arg max of the last position
      features float32           → [B, …], standardised                                 → softmax, top 5

Real work on real files: random samples of the model's own input shape, written to a temporary folder and read back. Decoding
compressed images is not included, and the files were just written, so they come from the page cache, not the disk. One after the
other the stages take their sum; overlapped (prefetch) they take at best the longest one, on the CPU only if cores are to spare.
Inputs other than the first tensor (masks, caches) are the model's example inputs, unchanged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..core.dtypes import canonical
from ..core.errors import MeasureError, OptionError
from ..core.profile import Timing
from ..core.timing import garbage_collector_off, summarise
from ..workload.case import CaseOptions, ModelCase
from .subject import build_subject, choose_device, evaluating

STAGES = ("load", "preprocess", "host copy", "model", "postprocess")
BATCHES = 4  # distinct batches on disk
SPECIAL_TOKENS = 3  # padding, start, end come before the 256 byte tokens
WORDS = ("roof", "memory", "lane", "cache", "ridge", "tile", "warp", "núcleo", "线程")
IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the way, for one batch."""

    name: str
    timing: Timing
    share: float  # of the sum of the stages
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PipelineProfile:
    """Stages with what they add up to, and what overlapping them would give."""

    model: str
    device: str
    batch: int
    kind: str  # images, text or features
    stages: tuple[Stage, ...]
    total: Timing  # a batch, end to end
    samples_per_s: float
    binding: str  # the longest stage
    overlapped_s: float
    overlapped_samples_per_s: float
    overlap_speedup: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("stages", "total", "notes")
        }
        stages = [{"name": s.name, "share": s.share, "detail": s.detail, **s.timing.to_dict()} for s in self.stages]
        return {**plain, "total": self.total.to_dict(), "stages": stages, "notes": list(self.notes)}

    def table(self) -> str:
        """The stages as text."""
        lines = [f"{self.model} on {self.device}, batch {self.batch}: {self.kind} from file to answer"]
        for stage in self.stages:
            spread = f"p20 {stage.timing.p20_s * 1e3:.3f}, p80 {stage.timing.p80_s * 1e3:.3f}"
            lines.append(f"  {stage.name:<12}{stage.timing.median_s * 1e3:>10.3f} ms  {stage.share:>6.1%}  {stage.detail or spread}")
        lines.append(f"  {'total':<12}{self.total.median_s * 1e3:>10.3f} ms  {self.samples_per_s:.1f} samples/s; {self.binding} binds")
        overlapped = f"{self.overlapped_s * 1e3:.3f} ms: {self.overlapped_samples_per_s:.1f} samples/s, {self.overlap_speedup:.2f}x"
        lines.append(f"  overlapped, at best {overlapped}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)]) + "\n"


def measure_pipeline(
    model: str | Path | torch.nn.Module,
    inputs: Any = None,
    *,
    device: str | None = None,
    batch: int | None = None,
    dtype: str | torch.dtype | None = None,
    phase: str | None = None,
    context: int | None = None,
    name: str | None = None,
    repeats: int = 10,
    warmup: int = 2,
    channels_last: bool = False,
) -> PipelineProfile:
    """Time every stage from files to answers."""
    if repeats < 1 or warmup < 0:
        raise OptionError(
            f"repeats={repeats}, warmup={warmup}", why="there must be at least one repeat", do="give repeats >= 1 and warmup >= 0"
        )
    place = choose_device(device, model)
    case = build_subject(
        model, inputs, CaseOptions(batch, canonical(dtype) if dtype else None, phase, context, str(place)), name, channels_last
    )
    with tempfile.TemporaryDirectory(prefix="ridgeline-pipeline-") as folder, evaluating(case.module):
        way = _Way(case, place, Path(folder))
        with garbage_collector_off(), torch.inference_mode():
            for index in range(warmup):
                way.run(index)
            passes = [way.run(index) for index in range(repeats)]
    return _summarise(way, passes)


class _Way:
    """The five stages for one model, over a data set written to `folder`."""

    def __init__(self, case: ModelCase, place: torch.device, folder: Path) -> None:
        leaves, self.spec = tree_flatten((case.args, case.kwargs))
        self.leaves = list(leaves)
        self.slot = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), -1)
        if self.slot < 0 or self.leaves[self.slot].dim() == 0:
            raise MeasureError(
                f"no pipeline for {case.name}", why="its inputs hold no tensor with samples in it", do="give a tensor of a batch of samples"
            )
        self.example: torch.Tensor = self.leaves[self.slot]
        self.case, self.place = replace(case, batch=int(self.example.shape[0])), place
        self.kind = kind_of(self.example)
        self.vocabulary = _vocabulary(case.module)
        self.batches = [self._write(folder, index) for index in range(BATCHES)]
        self.layout = (
            torch.channels_last if self.example.dim() == 4 and self.example.is_contiguous(memory_format=torch.channels_last) else None
        )

    def _write(self, folder: Path, index: int) -> list[Path]:
        random = numpy.random.default_rng(index)
        paths = [folder / f"{index}-{sample}.npy" for sample in range(self.case.batch)]
        for path in paths:
            numpy.save(path, _sample(self.kind, tuple(self.example.shape[1:]), random), allow_pickle=False)
        return paths

    def run(self, index: int) -> list[float]:
        """Seconds of each stage for one batch."""
        stages: list[Callable[[Any], Any]] = [self.load, self.preprocess, self.copy, self.model, self.postprocess]
        value: Any = self.batches[index % BATCHES]
        spent = []
        for stage in stages:
            start = perf_counter()
            value = stage(value)
            if self.place.type == "cuda":
                torch.cuda.synchronize(self.place)
            spent.append(perf_counter() - start)
        return spent

    def load(self, paths: list[Path]) -> list[Any]:
        return [numpy.load(path, allow_pickle=False) for path in paths]

    def preprocess(self, samples: list[Any]) -> torch.Tensor:
        if self.kind == "images":
            return normalise_images(numpy.stack(samples), self.example.dtype, self.layout)
        if self.kind == "text":
            return tokenise(samples, int(self.example.shape[1]), self.vocabulary, self.example.dtype)
        features = torch.from_numpy(numpy.stack(samples))  # [B, …]
        return ((features - features.mean()) / (features.std() + 1e-6)).to(self.example.dtype)

    def copy(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.to(self.place)

    def model(self, batch: torch.Tensor) -> Any:
        args, kwargs = tree_unflatten([*self.leaves[: self.slot], batch, *self.leaves[self.slot + 1 :]], self.spec)
        return self.case.module(*args, **kwargs)

    def postprocess(self, output: Any) -> list[Any]:
        scores = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()), None)
        if scores is None or scores.dim() == 0:
            return []
        if self.kind == "text":
            last = scores[:, -1] if scores.dim() == 3 else scores  # [B, T, V] → [B, V]
            return list(last.argmax(-1).tolist())
        best = scores.flatten(1).float().softmax(-1).topk(min(5, scores.flatten(1).shape[1]))
        return [best.indices.tolist(), best.values.tolist()]


def kind_of(example: torch.Tensor) -> str:
    """What a model's first input holds."""
    if example.is_floating_point():
        return "images" if example.dim() == 4 else "features"
    if example.dim() == 2 and example.dtype in (torch.int64, torch.int32):
        return "text"
    raise MeasureError(
        f"no pipeline for an input of {example.dtype} {list(example.shape)}",
        why="only images [B, C, H, W], token ids [B, T] and floating-point features have one",
        do="measure the model alone",
    )


def _sample(kind: str, shape: tuple[int, ...], random: numpy.random.Generator) -> Any:
    if kind == "images":
        channels, height, width = shape
        return random.integers(0, 256, (height, width, channels), dtype=numpy.uint8)
    if kind == "text":
        words = random.choice(WORDS, 1 + shape[0] // 4)
        return numpy.frombuffer(" ".join(words).encode(), dtype=numpy.uint8)
    return random.standard_normal(shape, dtype=numpy.float32)


def normalise_images(pixels: Any, dtype: torch.dtype, layout: torch.memory_format | None = None) -> torch.Tensor:
    """uint8 [B, H, W, C] → (value / 255 − mean) / deviation as [B, C, H, W]."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32).div_(255)
    channels = images.shape[1]
    mean, std = (torch.tensor(v) if channels == 3 else torch.full((channels,), 0.5) for v in (IMAGE_MEAN, IMAGE_STD))
    images = images.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)).to(dtype)
    return images.contiguous(memory_format=layout or torch.contiguous_format)


def tokenise(texts: list[Any], length: int, vocabulary: int | None, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """UTF-8 bytes → [B, length] ids: start, a token a byte, end, padding; kept inside the vocabulary."""
    rows = []
    for raw in texts:
        text = raw.tobytes().decode("utf-8")
        ids = [1, *(byte + SPECIAL_TOKENS for byte in text.encode("utf-8")), 2][:length]
        rows.append(ids + [0] * (length - len(ids)))
    tokens = torch.tensor(rows, dtype=dtype)
    return tokens % vocabulary if vocabulary else tokens


def _vocabulary(module: torch.nn.Module) -> int | None:
    """The size of the first embedding table: token ids must stay below it."""
    return next((child.num_embeddings for child in module.modules() if isinstance(child, torch.nn.Embedding)), None)


def _summarise(way: _Way, passes: list[list[float]]) -> PipelineProfile:
    timings = [summarise([spent[i] for spent in passes]) for i in range(len(STAGES))]
    on_host = way.place.type == "cpu"
    if on_host:
        timings[2] = Timing(0.0, 0.0, 0.0, len(passes))
    whole_s = sum(timing.median_s for timing in timings)
    details = {"host copy": "none: the model runs on the CPU"} if on_host else {}
    stages = tuple(Stage(n, t, t.median_s / whole_s, details.get(n, "")) for n, t in zip(STAGES, timings, strict=True))
    longest = max(stages, key=lambda stage: stage.timing.median_s)
    total, best_s, batch = summarise([sum(spent) for spent in passes]), longest.timing.median_s, way.case.batch
    notes = ["files come from the page cache: a cold disk adds to load"]
    if on_host:
        notes.append("overlapping on the CPU gains only what other cores are free to do")
    return PipelineProfile(
        way.case.name, str(way.place), batch, way.kind, stages, total, batch / total.median_s, longest.name, best_s,
        batch / best_s, total.median_s / best_s, tuple(notes),
    )  # fmt: skip
