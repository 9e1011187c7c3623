"""What the inputs of each layer look like, in the order the layers run, while the layers before them are already replaced.

    model, names, calibration inputs ──stages──> Stage(layers that read one tensor, Statistics of it) ──> caller replaces them ──> next

A decoder is walked block by block: the inputs of block 0 are caught once, then each block runs alone, so that a layer sees what the
quantised layers before it give (Frantar 2022) and the cost grows with the blocks, not with their square. A model without a list of
blocks is run once as it is, and all its layers are measured in that pass. Layers that read the same tensor share a stage.

    Statistics: gram = sum of x xᵀ [K, K] float64, magnitude = sum of |x| [K], rows        x: the layer's input, one row a product
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import TransformError

Inputs = Sequence[tuple[Any, ...]]


@dataclass(slots=True)
class Statistics:
    """Sums over the rows a layer multiplied."""

    gram: Tensor
    magnitude: Tensor
    rows: int = 0

    @classmethod
    def empty(cls, columns: int, device: torch.device) -> Statistics:
        return cls(torch.zeros(columns, columns, dtype=torch.float64, device=device), torch.zeros(columns, device=device))

    def add(self, x: Tensor) -> None:
        """x [rows, K]."""
        wide = x.float()
        self.gram += (wide.t() @ wide).double()
        self.magnitude += wide.abs().sum(0)
        self.rows += len(x)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers that read one tensor. `source` is the layer that made it, where a layer did; `check` runs what surrounds them once."""

    names: tuple[str, ...]
    statistics: Statistics
    source: str | None = None
    check: Callable[[], Tensor] | None = None


class _Stop(Exception):
    """Enough has been seen of this pass."""


@dataclass(slots=True)
class _Block:
    name: str
    module: nn.Module
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


def input_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """[rows, K]: what multiplies the weight's columns; patches for a convolution."""
    x = x.detach()
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    padding: Any = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
    patches = functional.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride)
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])


def columns_of(layer: nn.Module) -> int:
    weight: Any = layer.weight
    return int(weight[0].numel())


@torch.no_grad()
def stages(model: nn.Module, names: Iterable[str], calibration: Inputs) -> Iterator[Stage]:
    """Stages in running order; replace a stage's layers before asking for the next."""
    wanted = list(names)
    if not calibration:
        raise TransformError(
            "calibration without inputs", why="the layers' inputs are measured on them", do="give calibration=[(inputs,), …]"
        )
    blocks = _blocks(model, wanted, calibration)
    for index, block in enumerate(blocks):
        inside = [name for name in wanted if name.startswith(block.name + ".")]
        yield from _block_stages(model, block, inside)
        if index + 1 < len(blocks):
            blocks[index + 1].inputs = [((_first(block.module(*args, **kw)), *args[1:]), kw) for args, kw in block.inputs]
        block.inputs = []
    done = tuple(block.name + "." for block in blocks)
    rest = [name for name in wanted if not name.startswith(done)] if done else wanted
    if rest:
        yield from _whole_model(model, rest, calibration)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _blocks(model: nn.Module, wanted: list[str], calibration: Inputs) -> list[_Block]:
    """The model's chain of blocks with the first one's inputs; none where there is no list whose members feed one another."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        blocks = [_Block(f"{name}.{index}" if name else str(index), block) for index, block in enumerate(module)]
        if all(any(one.startswith(block.name + ".") for one in wanted) for block in blocks) and _is_chain(model, blocks, calibration[0]):
            blocks[0].inputs = _caught(model, blocks[0].module, calibration)
            return blocks
    return []


def _is_chain(model: nn.Module, blocks: list[_Block], inputs: tuple[Any, ...]) -> bool:
    """Whether each block's first argument is the output of the one before and the others never change."""
    seen: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
    outputs: list[Any] = []

    def before(index: int) -> Callable[..., None]:
        return lambda module, args, kwargs: seen.append((index, args, kwargs))

    hooks = [block.module.register_forward_pre_hook(before(index), with_kwargs=True) for index, block in enumerate(blocks)]
    hooks += [block.module.register_forward_hook(lambda module, args, output: outputs.append(_first(output))) for block in blocks]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if [index for index, _, _ in seen] != list(range(len(blocks))) or not all(args for _, args, _ in seen):
        return False
    linked = all(after[1][0] is output for after, output in zip(seen[1:], outputs[:-1], strict=True))
    same = all(_same(seen[0][1][1:], args[1:]) and _same(seen[0][2].values(), kwargs.values()) for _, args, kwargs in seen)
    return linked and same


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    some, others = list(some), list(others)
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _caught(model: nn.Module, block: nn.Module, calibration: Inputs) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise _Stop

    hook = block.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for inputs in calibration:
            _run(lambda inputs=inputs: model(*inputs))  # type: ignore[misc]
    finally:
        hook.remove()
    return caught


def _run(call: Callable[[], Any]) -> None:
    try:
        call()
    except _Stop:
        return


def _block_stages(model: nn.Module, block: _Block, names: list[str]) -> Iterator[Stage]:
    args, kwargs = block.inputs[0]
    for group, source in _order(model, block.module, names, lambda: block.module(*args, **kwargs)):
        layer = model.get_submodule(group[0])
        sums = Statistics.empty(columns_of(layer), args[0].device)

        def measure(module: nn.Module, inputs: tuple[Any, ...], sums: Statistics = sums) -> None:
            sums.add(input_rows(module, inputs[0]))
            raise _Stop

        hook = layer.register_forward_pre_hook(measure)
        try:
            for one, named in block.inputs:
                _run(lambda one=one, named=named: block.module(*one, **named))  # type: ignore[misc]
        finally:
            hook.remove()
        yield Stage(tuple(group), sums, source, lambda: _first(block.module(*args, **kwargs)).clone())


def _order(model: nn.Module, root: nn.Module, names: list[str], call: Callable[[], Any]) -> list[tuple[list[str], str | None]]:
    """(layers that read the same tensor, the module that gave it) in the order they ran."""
    groups: list[tuple[Tensor, list[str]]] = []
    made: list[tuple[Tensor, str]] = []
    paths = {module: name for name, module in model.named_modules()}

    def reads(module: nn.Module, args: tuple[Any, ...]) -> None:
        home = next((group for tensor, group in groups if tensor is args[0]), None)
        if home is None:
            groups.append((args[0], [paths[module]]))
        elif paths[module] not in home:
            home.append(paths[module])

    hooks = [model.get_submodule(name).register_forward_pre_hook(reads) for name in names]
    leaves = [module for module in root.modules() if not any(True for _ in module.children())]
    hooks += [leaf.register_forward_hook(lambda module, args, out: made.append((out, paths[module]))) for leaf in leaves]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    sources = [next((name for out, name in made if out is tensor), None) for tensor, _ in groups]
    return [(group, source) for (_, group), source in zip(groups, sources, strict=True)]


def _whole_model(model: nn.Module, names: list[str], calibration: Inputs) -> Iterator[Stage]:
    layers = {name: model.get_submodule(name) for name in names}
    sums: dict[str, Statistics] = {}

    def measure(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, args: tuple[Any, ...]) -> None:
            rows = input_rows(module, args[0])
            sums.setdefault(name, Statistics.empty(rows.shape[1], rows.device)).add(rows)

        return add

    hooks = [layer.register_forward_pre_hook(measure(name)) for name, layer in layers.items()]
    try:
        for inputs in calibration:
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name in names:
        if name in sums:
            yield Stage((name,), sums.pop(name))
