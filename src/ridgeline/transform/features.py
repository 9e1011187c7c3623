"""What happens inside student and teacher, brought together: hooks on named layers, adapters, attention maps.

    student layer ──tap──> s [B,C,H,W] ──adapter (1x1, trained)──> [B,C',H,W] ──pool──┐
    teacher layer ──tap──> t [B,C',H',W'] ──pool to the smaller of the two────────────┴──> mean (s − t)²      kind "hidden"
      also [B,T,D] and [B,D], with a linear adapter. An adapter is the identity where the widths agree.      Ref: Romero 2015

    q(x) = Σ_c x² / C over channels, flattened, divided by its length       [B,C,H,W] → [B,H·W],  [B,T,D] → [B,T]
      ‖q(s) − q(t)‖², mean over the batch: 0 to 2, needs no adapter             kind "attention"   Ref: Zagoruyko 2017
      of maps of different sizes the larger is resized to the smaller. For a transformer tap the attention blocks' outputs.

Adapters are made once, from one batch's shapes, before the optimiser is: they train with the student and are dropped after.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.errors import TransformError, nearest
from ..train.loss import call_model

Kind = Literal["hidden", "attention"]


class Taps:
    """Outputs of named layers during a pass, for as long as it is entered."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], who: str) -> None:
        layers = dict(model.named_modules())
        for name in names:
            if name not in layers or name == "":
                close = nearest(name, layers)
                hint = f"did you mean {', '.join(close)}?" if close else "see its named_modules()"
                raise TransformError(f"{who} has no layer {name!r}", why="features are taken from layers by name", do=hint)
        self.layers = {name: layers[name] for name in names}
        self.outputs: dict[str, Tensor] = {}
        self.copied: frozenset[str] = frozenset()  # layers whose output is changed in place later (an in-place ReLU)
        self._handles: list[Any] = []

    def __enter__(self) -> Taps:
        for name, layer in self.layers.items():
            self._handles.append(layer.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.outputs.clear()

    def _hook(self, name: str) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            if not isinstance(first, Tensor):
                raise TransformError(
                    f"layer {name!r} returns {type(output).__name__}",
                    why="a feature is one tensor",
                    do="name a layer that returns a tensor",
                )
            self.outputs[name] = first.clone() if name in self.copied else first

        return note

    def take(self) -> dict[str, Tensor]:
        """What the last pass left, which must have reached every layer; empty afterwards."""
        missing = [name for name in self.layers if name not in self.outputs]
        if missing:
            raise TransformError(f"layer {missing[0]!r} was not run", why="the pass does not go through it", do="name a layer that is")
        taken = dict(self.outputs)
        self.outputs.clear()
        return taken

    def try_out(self, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
        """One pass to learn the shapes, and which outputs are changed in place after their layer; entered only for this."""
        was = [(module, module.training) for module in model.modules()]
        versions: dict[str, int] = {}
        model.eval()
        try:
            with self, torch.no_grad():
                marks = [
                    layer.register_forward_hook(lambda _, __, ___, name=name: versions.__setitem__(name, self.outputs[name]._version))
                    for name, layer in self.layers.items()
                ]
                try:
                    call_model(model, inputs)
                finally:
                    for mark in marks:
                        mark.remove()
                seen = self.take()
        finally:
            for module, training in was:
                module.training = training
        self.copied = frozenset(name for name, tensor in seen.items() if tensor._version != versions[name])
        return seen


class Bridge(nn.Module):
    """The feature term between pairs of layers, with its adapters as parameters."""

    def __init__(self, pairs: Mapping[str, str], kind: Kind, student: Mapping[str, Tensor], teacher: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.pairs, self.kind = dict(pairs), kind
        self.adapters = nn.ModuleList()
        for own, other in self.pairs.items():
            s, t = student[own], teacher[other]
            _require_alike(own, other, s, t, kind)
            self.adapters.append(adapter(s, t) if kind == "hidden" else nn.Identity())

    def forward(self, student: Mapping[str, Tensor], teacher: Mapping[str, Tensor]) -> Tensor:
        """Mean of the pairs' terms, in float32 at least."""
        terms = []
        for (own, other), fit in zip(self.pairs.items(), self.adapters, strict=True):
            t = teacher[other].detach()
            terms.append(hidden_loss(fit(student[own]), t) if self.kind == "hidden" else attention_loss(student[own], t))
        return torch.stack(terms).mean()


def adapter(student: Tensor, teacher: Tensor) -> nn.Module:
    """A trainable map from the student's width to the teacher's; the identity where they agree."""
    axis = 1 if student.dim() == 4 else -1
    width, wanted = student.shape[axis], teacher.shape[axis]
    if width == wanted:
        return nn.Identity()
    made: nn.Module = nn.Conv2d(width, wanted, 1) if student.dim() == 4 else nn.Linear(width, wanted)
    return made.to(student.device, student.dtype)


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference; of images of different sizes the larger is averaged down to the smaller."""
    with torch.autocast(student.device.type, enabled=False):
        s, t = _wide(student), _wide(teacher)
        if s.dim() == 4 and s.shape[2:] != t.shape[2:]:
            size = (min(s.shape[2], t.shape[2]), min(s.shape[3], t.shape[3]))
            s, t = functional.adaptive_avg_pool2d(s, size), functional.adaptive_avg_pool2d(t, size)
        return functional.mse_loss(s, t)


def attention_map(x: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
    """Where the energy is: mean of squares over channels [B,C,H,W] → [B,H·W] (or [B,T,D] → [B,T]), of length 1 a sample."""
    squares = x.square().mean(1 if x.dim() == 4 else -1)  # [B,H,W] or [B,T]
    if size is not None and squares.shape[1:] != size:
        mode = "bilinear" if x.dim() == 4 else "linear"
        squares = functional.interpolate(squares[:, None], size=size, mode=mode, align_corners=False)[:, 0]
    return functional.normalize(squares.flatten(1), dim=1)


def attention_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of the two unit maps, mean over the batch."""
    with torch.autocast(student.device.type, enabled=False):
        s, t = _wide(student), _wide(teacher)
        sizes = [tuple(x.shape[2:] if x.dim() == 4 else x.shape[1:2]) for x in (s, t)]
        size = tuple(map(min, *sizes))
        return (attention_map(s, size) - attention_map(t, size)).square().sum(1).mean()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _require_alike(own: str, other: str, s: Tensor, t: Tensor, kind: Kind) -> None:
    shapes = f"{own} {list(s.shape)} with {other} {list(t.shape)}"
    if s.dim() != t.dim() or s.dim() not in ((2, 3, 4) if kind == "hidden" else (3, 4)):
        allowed = "[B,D], [B,T,D] or [B,C,H,W]" if kind == "hidden" else "[B,T,D] or [B,C,H,W]"
        raise TransformError(
            f"features {shapes}", why=f"{kind} features are {allowed}, the same kind on both sides", do="pair other layers"
        )
    if s.dim() == 3 and kind == "hidden" and s.shape[1] != t.shape[1]:
        raise TransformError(f"features {shapes}", why="hidden states are compared token by token", do="pair layers of the same length")
