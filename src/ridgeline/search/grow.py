"""Growth that keeps the function (Net2Net, Chen 2016): wider layers, more layers, more branches, the same outputs.

    wider(model, "layers.3.body.0", 96)   channels are doubled in place; who takes them splits its weights between the two
    deeper(model, after="layers.3")       an identity layer more: after a ReLU conv, batch norm, ReLU; elsewhere a residual of gain 0
    branch(model, "layers.3.body")        module(x) + gain * another(x), gain 0

Each gives a new model; the given one stays. Outputs agree in eval mode to rounding (1e-5 in float32, 1e-10 in float64). Paths below a
deeper or branched module get longer. Optimiser states are not grown: make a new optimiser.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..core.errors import OptionError, TransformError, unknown_name
from .grow_channels import Channels, Ids, Layer, find_channels
from .spaces.transformer import Attention, FeedForward

IDEMPOTENT = (nn.ReLU, nn.ReLU6)
"""Activations that change nothing when applied again."""


def growable(model: nn.Module) -> dict[str, int]:
    """The layers `wider` can widen, by path, with their channels."""
    channels = find_channels(model)
    return {path: len(layer.given) for path, layer in channels.layers.items() if _mixes(layer) and _refusal(channels, layer.given) is None}


def wider(model: nn.Module, path: str, width: int, *, noise: float = 0.25, seed: int = 0) -> nn.Module:
    """The model with `width` output channels at this convolution or linear layer, and at every layer whose output is added to it.

    Twins start equal. With `noise` above 0 they are weighted unequally by those who take them, so that they learn differently; the sum, and
    with it the function, is the same.
    """
    grown = copy.deepcopy(model)
    channels = find_channels(grown)
    layer = channels.layers.get(path)
    if layer is None or not _mixes(layer):
        raise unknown_name(
            "layer to widen", path, [name for name, known in channels.layers.items() if _mixes(known)], see="growable(model)"
        )
    if width <= len(layer.given):
        raise OptionError(f"width {width} of {path}", why=f"it has {len(layer.given)} channels already", do="give more")
    if not 0 <= noise < 1:
        raise OptionError(f"noise {noise}", why="at 1 a twin could count for nothing", do="give 0 to 0.9")
    reason = _refusal(channels, layer.given)
    if reason is not None:
        raise TransformError(f"{path} cannot be widened", why=reason, do="choose one of growable(model)")
    _refuse_shared(grown)
    random = np.random.default_rng(seed)
    times = _times(channels, path, layer, width, random)
    for each in channels.layers.values():
        _widen(channels, each, times, noise, random)
    return grown


def _mixes(layer: Layer) -> bool:
    """Whether it makes new channels, rather than passing on those it takes."""
    return isinstance(layer.module, nn.Linear) or (isinstance(layer.module, _ConvNd) and layer.module.groups == 1)


def _refusal(channels: Channels, ids: Ids) -> str | None:
    return next((channels.frozen[int(root)] for root in channels.roots(ids) if int(root) in channels.frozen), None)


def _refuse_shared(model: nn.Module) -> None:
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            raise TransformError(f"{name} is also {seen[id(parameter)]}", why="a shared weight cannot grow in one place only", do="copy it")
        seen[id(parameter)] = name


def _times(channels: Channels, path: str, layer: Layer, width: int, random: np.random.Generator) -> dict[int, int]:
    """How often each channel is there afterwards: as equal as can be, which ones come first by chance."""
    roots, places = np.unique(channels.roots(layer.given), return_counts=True)
    times = {int(root): 1 for root in roots}
    missing = width - len(layer.given)
    while missing > 0:
        added = 0
        for place in random.permutation(len(roots)):
            if places[place] <= missing - added:
                times[int(roots[place])] += 1
                added += int(places[place])
        if added == 0:
            raise TransformError(
                f"{path} cannot have {width} channels", why="some of its channels grow together", do="choose another width"
            )
        missing -= added
    return times


def _widen(channels: Channels, layer: Layer, times: dict[int, int], noise: float, random: np.random.Generator) -> None:
    module = layer.module
    given = np.array([times.get(int(root), 1) for root in channels.roots(layer.given)])
    if given.max(initial=1) > 1:
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensor = getattr(module, name, None)
            if tensor is not None:
                _set(module, name, tensor.detach().repeat_interleave(torch.from_numpy(given).to(tensor.device), dim=0))
        _set_counts(module, given=int(given.sum()))
    if layer.taken is None:
        return
    taken = np.array([times.get(int(root), 1) for root in channels.roots(layer.taken.ids)])
    if taken.max(initial=1) > 1:
        weight = cast(Tensor, module.weight).detach()
        device, dtype = weight.device, weight.dtype
        shares = torch.from_numpy(_shares(taken, noise, random)).to(device=device, dtype=torch.float64)
        # a linear layer after a flatten has several columns a channel: [out, C, places]
        folded = weight.reshape(weight.shape[0], len(taken), -1).repeat_interleave(torch.from_numpy(taken).to(device), dim=1)
        folded = (folded.double() * shares[:, None]).to(dtype)
        _set(module, "weight", folded.reshape(weight.shape[0], -1, *weight.shape[2:]))
        _set_counts(module, taken=cast(Tensor, module.weight).shape[1])


def _shares(times: Ids, noise: float, random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each twin counts for: sums to 1 over the twins of a channel."""
    raw = 1 + noise * random.uniform(-1, 1, int(times.sum()))
    starts = np.concatenate([[0], np.cumsum(times)[:-1]])
    shares: np.ndarray[Any, np.dtype[np.float64]] = raw / np.repeat(np.add.reduceat(raw, starts), times)
    return shares


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    before = getattr(module, name)
    if isinstance(before, nn.Parameter):
        setattr(module, name, nn.Parameter(value.clone(), requires_grad=before.requires_grad))
    else:
        module.register_buffer(name, value.clone())


def _set_counts(module: Any, *, given: int | None = None, taken: int | None = None) -> None:
    """The module's own numbers of its channels."""
    if isinstance(module, _BatchNorm):
        module.num_features = given or module.num_features
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = given or module.out_features, taken or module.in_features
    elif module.groups > 1:
        module.groups = module.in_channels = module.out_channels = given or module.out_channels
    else:
        module.out_channels, module.in_channels = given or module.out_channels, taken or module.in_channels


def deeper(model: nn.Module, after: str, inputs: Tensor | None = None, *, kernel: int = 3) -> nn.Module:
    """The model with one more layer after the module at that path.

    After a ReLU it is convolution, batch norm and ReLU (or linear and ReLU) that begin as the identity; with `inputs` the batch norm begins
    with the statistics of what passes there, so that training starts from the same function too. Elsewhere the layer is a residual one of
    gain 0; after a transformer layer, another of its kind that adds nothing yet.
    """
    grown = copy.deepcopy(model)
    module = _at(grown, after)
    if isinstance(module, Attention | FeedForward):
        _put(grown, after, Followed(module, _like(_silent(module), module)))
        return grown
    if kernel % 2 == 0:
        raise OptionError(f"kernel {kernel}", why="only an odd one has a middle", do="give 1, 3, 5 or 7")
    passing = None if inputs is None else _passing(model, after, inputs)
    channels, kind = _shape(grown, after, passing)
    if kind == "row":
        layers: list[nn.Module] = [_identity_linear(channels)]
    else:
        layers = [_identity_conv(channels, kernel), _identity_norm(channels, passing)]
    if isinstance(module, IDEMPOTENT):
        added: nn.Module = nn.Sequential(*layers, copy.deepcopy(module))
    else:
        added = Branched(nn.Identity(), nn.Sequential(*layers, nn.ReLU()))
    _put(grown, after, Followed(module, _like(added, module, grown)))
    return grown


class Followed(nn.Sequential):
    """The first may take several inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self[1](self[0](*inputs))
        return out


class Branched(nn.Module):
    """main(x) + gain * side(x)"""

    def __init__(self, main: nn.Module, side: nn.Module) -> None:
        super().__init__()
        self.main, self.side, self.gain = main, side, nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Tensor) -> Tensor:
        main: Tensor = self.main(*inputs)
        side: Tensor = self.side(*inputs)
        return main + self.gain * side


def branch(model: nn.Module, path: str, make: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The model with a second branch beside the module at that path: what `make` gives (the same shapes in and out), or the module's own
    kind with fresh weights."""
    grown = copy.deepcopy(model)
    module = _at(grown, path)
    side = make() if make else _renewed(module)
    _put(grown, path, _like(Branched(module, side), module, grown))
    return grown


def _renewed(module: nn.Module) -> nn.Module:
    fresh = copy.deepcopy(module)
    for part in fresh.modules():
        if hasattr(part, "reset_parameters"):
            cast(Any, part).reset_parameters()
    return fresh


def _silent(module: Attention | FeedForward) -> nn.Module:
    """Another of its kind that adds nothing to its input yet."""
    fresh = _renewed(module)
    last = fresh.out if isinstance(fresh, Attention) else cast(FeedForward, fresh).narrow
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return fresh


def _identity_conv(channels: int, kernel: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)
    nn.init.dirac_(conv.weight)
    return conv


def _identity_linear(channels: int) -> nn.Linear:
    linear = nn.Linear(channels, channels)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


@torch.no_grad()
def _identity_norm(channels: int, passing: Tensor | None) -> nn.BatchNorm2d:
    """It scales by what it divides by and adds what it takes away."""
    norm = nn.BatchNorm2d(channels, dtype=torch.float64 if passing is None else passing.dtype)
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    if passing is not None:
        mean.copy_(passing.mean((0, 2, 3)))
        variance.copy_(passing.var((0, 2, 3), correction=0))
    norm.weight.copy_((variance + norm.eps).sqrt())
    norm.bias.copy_(mean)
    return norm


@torch.no_grad()
def _passing(model: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """What the module at that path gives for these inputs, in eval mode."""
    found: list[Tensor] = []
    probe = copy.deepcopy(model).eval()
    _at(probe, path).register_forward_hook(lambda module, given, output: found.append(output))
    probe(inputs)
    if not found or not isinstance(found[0], Tensor):
        raise TransformError(f"nothing passes {path}", why="the model does not call it, or it gives no tensor", do="choose another path")
    return found[0].cpu()


def _shape(model: nn.Module, path: str, passing: Tensor | None) -> tuple[int, str]:
    """Channels, and whether they are a map's or a row's."""
    if passing is not None and passing.dim() in (2, 4):
        return int(passing.shape[1]), "map" if passing.dim() == 4 else "row"
    value = find_channels(model).values.get(path)
    if value is None or value.flat:
        raise TransformError(
            f"no layer can be put after {path}",
            why="it is not known to give [B, C, H, W] or [B, C]",
            do="choose another path, or give example inputs",
        )
    return len(value.ids), value.kind


def _at(model: nn.Module, path: str) -> nn.Module:
    modules = dict(model.named_modules())
    if not path or path not in modules:
        raise unknown_name("module", path, list(filter(None, modules)), see="model.named_modules()")
    found: nn.Module = modules[path]
    if isinstance(found, nn.ModuleList | nn.ModuleDict):
        raise TransformError(f"{path} is a list of modules", why="it is not called itself", do="choose one of its modules")
    return found


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _like(added: nn.Module, module: nn.Module, model: nn.Module | None = None) -> nn.Module:
    """On the device, of the type and in the mode of the module, or of the model where the module has no weights."""
    candidates = [*module.parameters(), *(model.parameters() if model else ())]
    example = next((parameter for parameter in candidates if parameter.is_floating_point()), None)
    if example is not None:
        added.to(device=example.device, dtype=example.dtype)
    added.train(module.training)
    return added
