"""Which parts of a model are not trained.

    freeze=("conv1", "layer1.*", "*.bias") ──fnmatch on parameter and layer names──> requires_grad = False while training
      a layer's name freezes all below it; BatchNorm whose parameters are all frozen stays in evaluation mode

Patterns that match nothing are errors; requires_grad is as before when the run ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import OptionError, nearest


@contextmanager
def frozen(model: nn.Module, patterns: Sequence[str]) -> Iterator[list[nn.Module]]:
    """Inside, matching parameters take no gradient; yields the norms that must stay in evaluation mode."""
    # a shared layer or tied weight under each of its names
    layers = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in (*layers, *parameters)):
            close = nearest(pattern, [*layers, *parameters])
            hint = f"; did you mean {', '.join(close)}?" if close else f"; layers are {', '.join(layers[:8])}, …"
            raise OptionError(
                f"freeze = {pattern!r}", why=f"no layer or parameter of that name{hint}", do="give a name or a pattern with *"
            )
    stopped = [p for name, p in parameters.items() if p.requires_grad and _matches(name, patterns)]
    for parameter in stopped:
        parameter.requires_grad_(False)
    try:
        modules = model.named_modules(remove_duplicate=False)
        yield [module for name, module in modules if isinstance(module, _BatchNorm) and _still(name, module, patterns)]
    finally:
        for parameter in stopped:
            parameter.requires_grad_(True)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name or any layer above it matches."""
    parts = name.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(candidate, pattern) for pattern in patterns for candidate in above)


def _still(name: str, norm: nn.Module, patterns: Sequence[str]) -> bool:
    own = list(norm.parameters(recurse=False))
    return not any(parameter.requires_grad for parameter in own) if own else _matches(name, patterns)
