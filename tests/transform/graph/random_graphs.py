"""Random models for testing passes: branches, views, in-place ops, shared weights, constants, dead code. Float64.

    random_model(seed) -> (nn.Module in eval mode, inputs)      the same model for the same seed, batch 2 or 3
    random_capture(seed) -> Captured of it                       again(captured): a copy to run another pass on
    assert_same(captured, model, batches)                        answers within 1e-9 of the model's, at two batch sizes

A model is a list of steps; each takes values made before and adds one. A value knows its sizes without the batch, and
whether it may be written: not if it is expanded (overlapping memory), a weight, or a constant. The steps: STEPS.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.check import fresh_inputs, relative_error
from tests.support import FULL

TOLERANCE = 1e-9
Apply = Callable[..., Tensor]


@dataclass(frozen=True)
class Value:
    """One intermediate: its place, its sizes after the batch, and whether an in-place op may write it."""

    place: int
    sizes: tuple[int, ...]
    writable: bool = True


class RandomModel(nn.Module):
    """Runs its steps one after another; returns the values it was told to."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps: list[tuple[Apply, tuple[int, ...]]] = []
        self.values: list[Value] = []
        self.convs: list[tuple[str, int, int]] = []
        self.linears: list[tuple[str, int, int]] = []
        self.image = (self.choose.randint(2, 4), 4, 4)
        self.words = (self.choose.randint(3, 5), self.choose.choice((4, 8)))
        self.input(self.image)
        self.input(self.words)
        while len(self.values) < length:
            self.choose.choice(STEPS)(self)
        read = {source for _, sources in self.steps for source in sources}
        ends = [value.place for value in self.values[2:] if value.place not in read and self.choose.random() < 0.8]
        self.returned = [*ends, *(self.choose.randrange(len(self.values)) for _ in range(self.choose.randint(1, 2)))]

    def forward(self, image: Tensor, words: Tensor) -> tuple[Tensor, ...]:
        values = [image, words]
        for apply, sources in self.steps:
            values.append(apply(*(values[source] for source in sources)))
        return tuple(values[place] for place in self.returned)

    def input(self, sizes: tuple[int, ...]) -> None:
        # An in-place op on the caller's own tensor is allowed in one model of four.
        self.values.append(Value(len(self.values), sizes, self.choose.random() < 0.25))

    def add(self, apply: Apply, sources: tuple[Value, ...], sizes: tuple[int, ...], writable: bool = True) -> None:
        """A step, and the value it makes."""
        self.steps.append((apply, tuple(source.place for source in sources)))
        self.values.append(Value(len(self.values), tuple(sizes), writable))

    def pick(self, dims: int | None = None, test: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """A value with so many sizes, a recent one rather than an old one."""
        found = [value for value in self.values if (dims is None or len(value.sizes) == dims) and test(value)]
        return found[-1 - min(int(self.choose.expovariate(0.5)), len(found) - 1)] if found else None

    def tensor(self, *sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*sizes, generator=self.generator, dtype=torch.float64).to(dtype)

    def name(self, part: nn.Module) -> str:
        """Put a layer with weights from this model's own generator."""
        name = f"layer{len(self._modules)}"
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.copy_(self.tensor(*parameter.shape) * 0.5)
        self.add_module(name, part.double())
        return name


def conv(net: RandomModel) -> None:
    """A convolution, one time in three a layer that is there already (shared)."""
    source = net.pick(3, lambda value: value.sizes[1] >= 2)
    if source is None:
        return
    channels = source.sizes[0]
    shared = [entry for entry in net.convs if entry[1] == channels]
    if shared and net.choose.random() < 0.35:
        name, _, out = net.choose.choice(shared)
    else:
        groups = net.choose.choice((1, 1, channels))
        out = channels if groups > 1 or net.choose.random() < 0.5 else net.choose.randint(2, 5)
        size = net.choose.choice((1, 3))
        name = net.name(nn.Conv2d(channels, out, size, padding=size // 2, groups=groups, bias=net.choose.random() < 0.6))
        net.convs.append((name, channels, out))
    layer = net.get_submodule(name)
    net.add(lambda x: layer(x), (source,), (out, *source.sizes[1:]))


def conv_norm(net: RandomModel) -> None:
    """A convolution and a batch norm on it, at times with a second consumer between."""
    conv(net)
    between = net.values[-1]
    if net.choose.random() < 0.3:
        net.add(torch.tanh, (between,), between.sizes)
    norm(net, between)
    if net.choose.random() < 0.6:
        activation(net)


def norm(net: RandomModel, source: Value | None = None) -> None:
    """A batch norm with statistics of its own."""
    source = source or net.pick()
    if source is None or len(source.sizes) not in (1, 3):
        return
    kind = nn.BatchNorm2d if len(source.sizes) == 3 else nn.BatchNorm1d
    part = kind(source.sizes[0], eps=net.choose.choice((1e-5, 1e-3, 0.1)), affine=net.choose.random() < 0.8)
    part = part.double()
    part.running_mean = net.tensor(source.sizes[0])
    part.running_var = net.tensor(source.sizes[0]).abs() + 0.1
    layer = net.get_submodule(net.name(part))
    net.add(lambda x: layer(x), (source,), source.sizes)


def linear(net: RandomModel) -> None:
    """A linear, at times shared, at times with another's weight (tied)."""
    source = net.pick(test=lambda value: len(value.sizes) <= 2)
    if source is None:
        return
    width = source.sizes[-1]
    shared = [entry for entry in net.linears if entry[1] == width]
    if shared and net.choose.random() < 0.4:
        name, _, out = net.choose.choice(shared)
        if net.choose.random() < 0.5:
            tied = nn.Linear(width, out)
            other = net.name(tied)
            tied.weight = net.get_submodule(name).weight  # type: ignore[assignment]
            name = other
    else:
        out = net.choose.choice((4, 6, 8, width))
        name = net.name(nn.Linear(width, out, bias=net.choose.random() < 0.7))
        net.linears.append((name, width, out))
    layer = net.get_submodule(name)
    net.add(lambda x: layer(x), (source,), (*source.sizes[:-1], out))
    if net.choose.random() < 0.4:
        activation(net)


ACTIVATIONS: tuple[Apply, ...] = (F.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, F.hardtanh, F.softplus)
IN_PLACE: tuple[Apply, ...] = (
    torch.relu_,
    lambda x: x.mul_(0.5),
    lambda x: x.add_(1.0),
    lambda x: F.silu(x, inplace=True),
    lambda x: x[:, :1].add_(2.0),
    lambda x: x.transpose(0, 1).mul_(0.9),
    lambda x: F.dropout(x, 0.5, training=False, inplace=True),
)


def activation(net: RandomModel) -> None:
    source = net.pick()
    assert source is not None
    net.add(net.choose.choice(ACTIVATIONS), (source,), source.sizes)


def write(net: RandomModel) -> None:
    """An in-place op on a value others may have read before and will read after; the value itself goes on."""
    source = net.pick(test=lambda value: value.writable)
    if source is None:
        return
    change = net.choose.choice(IN_PLACE)
    other = net.pick(len(source.sizes), lambda value: value.sizes == source.sizes and value is not source)
    if other is not None and net.choose.random() < 0.3:
        net.add(lambda x, y: x.add_(y.clone()), (source, other), source.sizes)
        return

    def apply(x: Tensor) -> Tensor:
        change(x)
        return x

    net.add(apply, (source,), source.sizes)


def residual(net: RandomModel) -> None:
    """Two values of one shape."""
    left = net.pick()
    assert left is not None
    right = net.pick(len(left.sizes), lambda value: value.sizes == left.sizes)
    assert right is not None
    kinds: tuple[Apply, ...] = (torch.add, torch.add, torch.sub, lambda x, y: x * torch.sigmoid(y), torch.maximum)
    net.add(net.choose.choice(kinds), (left, right), left.sizes)


def join(net: RandomModel) -> None:
    left = net.pick(test=lambda value: value.sizes[0] <= 8)
    if left is None:
        return
    right = net.pick(len(left.sizes), lambda value: value.sizes[1:] == left.sizes[1:] and value.sizes[0] <= 8)
    assert right is not None
    if net.choose.random() < 0.2:
        net.add(lambda x: torch.cat([x], dim=1), (left,), left.sizes)
    else:
        net.add(lambda x, y: torch.cat([x, y], dim=1), (left, right), (left.sizes[0] + right.sizes[0], *left.sizes[1:]))


def view(net: RandomModel) -> None:
    """A view of a value: it may be written, and then the value changes with it."""
    source = net.pick()
    assert source is not None
    sizes = source.sizes
    count = 1
    for size in sizes:
        count *= size
    kinds: list[tuple[Apply, tuple[int, ...]]] = [
        (lambda x: x.reshape(x.shape[0], count), (count,)),
        (lambda x: x.reshape(x.shape), sizes),
        (lambda x: x.unsqueeze(1).squeeze(1), sizes),
        (lambda x: x.flatten(1), (count,)),
        (lambda x: x[:, : max(1, sizes[0] - 1)], (max(1, sizes[0] - 1), *sizes[1:])),
        (lambda x: x[:, :], sizes),
        (lambda x: x.contiguous(), sizes),
        (lambda x: x.to(torch.float64), sizes),
    ]
    if len(sizes) == 2:
        kinds += [
            (lambda x: x.transpose(1, 2), sizes[::-1]),
            (lambda x: x.permute(0, 2, 1).transpose(-1, -2), sizes),
            (lambda x: x[:, 0], sizes[1:]),
        ]
        if sizes[1] % 2 == 0:
            half = sizes[1] // 2
            kinds.append((lambda x: x.chunk(2, dim=-1)[1], (sizes[0], half)))
            kinds.append((lambda x: x.reshape(x.shape[0], sizes[0], 2, half).permute(0, 2, 1, 3), (2, sizes[0], half)))
    if len(sizes) == 3:
        kinds += [
            (lambda x: x.flatten(2), (sizes[0], sizes[1] * sizes[2])),
            (lambda x: x.flatten(2).transpose(1, 2), (sizes[1] * sizes[2], sizes[0])),
            (lambda x: x.permute(0, 2, 3, 1), (*sizes[1:], sizes[0])),
            (lambda x: x.permute(0, 1, 3, 2), (sizes[0], sizes[2], sizes[1])),
            (lambda x: x.reshape(x.shape[0], -1).reshape(x.shape[0], *sizes), sizes),
        ]
    apply, result = net.choose.choice(kinds)
    net.add(apply, (source,), result, source.writable)


def expand(net: RandomModel) -> None:
    """A value spread over a new dimension, and summed over it again or kept."""
    source = net.pick(1)
    if source is None:
        return
    net.add(lambda x: x.unsqueeze(1).expand(-1, 3, -1), (source,), (3, *source.sizes), writable=False)


def reduce(net: RandomModel) -> None:
    source = net.pick(test=lambda value: len(value.sizes) > 1)
    if source is None:
        return
    if len(source.sizes) == 3 and net.choose.random() < 0.7:
        kinds: tuple[Apply, ...] = (lambda x: x.mean((2, 3)), lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1))
        net.add(net.choose.choice(kinds), (source,), source.sizes[:1])
    elif len(source.sizes) == 3 and source.sizes[1] % 2 == 0 and source.sizes[2] % 2 == 0:
        net.add(lambda x: F.max_pool2d(x, 2), (source,), (source.sizes[0], source.sizes[1] // 2, source.sizes[2] // 2))
    else:
        net.add(lambda x: x.mean(1), (source,), source.sizes[1:])


def softmax(net: RandomModel) -> None:
    source = net.pick()
    assert source is not None
    net.add(lambda x: torch.softmax(x, dim=-1), (source,), source.sizes)


def layer_norm(net: RandomModel) -> None:
    source = net.pick(test=lambda value: value.sizes[-1] > 1)
    if source is None:
        return
    layer = net.get_submodule(net.name(nn.LayerNorm(source.sizes[-1], elementwise_affine=net.choose.random() < 0.8)))
    net.add(lambda x: layer(x), (source,), source.sizes)


def attention(net: RandomModel) -> None:
    """Attention by hand, of one value with itself."""
    source = net.pick(2)
    if source is None:
        return
    scale = source.sizes[1] ** -0.5
    net.add(lambda x: torch.softmax(x @ x.transpose(-2, -1) * scale, dim=-1) @ x, (source,), source.sizes)


def constants(net: RandomModel) -> None:
    """Arithmetic on weights and numbers, that folds; and arithmetic that does nothing."""
    source = net.pick()
    assert source is not None
    width = source.sizes[-1]
    name = f"table{len(net._buffers)}"
    net.register_buffer(name, net.tensor(width, dtype=net.choose.choice((torch.float64, torch.float64, torch.float32))))
    table = net._buffers[name]
    assert table is not None
    square = net.tensor(width, width)
    net.register_buffer(f"{name}_square", square)
    kinds: tuple[Apply, ...] = (
        lambda x: x + table.to(torch.float64) * 2,
        lambda x: x * torch.arange(width, dtype=torch.float64),
        lambda x: x + torch.full((width,), 0.5, dtype=torch.float64),
        lambda x: x @ square.t(),
        lambda x: x + torch.zeros(width, dtype=torch.float64),
        lambda x: x * 1,
        lambda x: x + 0.0,
        lambda x: x / 1.0,
        lambda x: x.clone(),
        lambda x: F.dropout(x, 0.1, training=False),
        lambda x: x + table.double().float().double(),
        lambda x: torch.tanh(x) + torch.tanh(x),
        lambda x: torch.where(torch.ones(width, width).tril().bool()[0], x, -1.0),
    )
    net.add(net.choose.choice(kinds), (source,), source.sizes)


STEPS: tuple[Callable[[RandomModel], None], ...] = (
    *(conv, conv_norm, conv_norm, norm, linear, linear, activation, activation, write, write, residual, residual),
    *(join, view, view, view, expand, reduce, softmax, layer_norm, attention, constants, constants),
)


def random_model(seed: int, length: int | None = None) -> tuple[RandomModel, tuple[Tensor, ...]]:
    """A model of 6 to 20 values and its inputs."""
    model = RandomModel(seed, length or 6 + seed % 15).eval()
    batch = 2 + seed % 2
    return model, (model.tensor(batch, *model.image), model.tensor(batch, *model.words))


def random_capture(seed: int, length: int | None = None) -> Captured:
    """The captured graph of a random model; the batch is open in one of three (that takes thrice as long), in all when full."""
    return capture_graph(*random_model(seed, length), dynamic_batch=FULL or seed % 3 == 0)


def again(captured: Captured) -> Captured:
    """A copy of a captured graph, to change; weights are shared."""
    return captured.copy()


def assert_same(captured: Captured, model: nn.Module, batches: tuple[int, ...] | None = None) -> None:
    """The graph gives the model's answers, and leaves the same in the inputs it writes, at these batch sizes."""
    for batch in batches or ((2, 4) if captured.batch_dynamic else (captured.batch,)):
        fresh = fresh_inputs(captured, batch, seed=batch)
        results = [_kept(one, fresh) for one in (captured.module, model)]
        for position, (ours, theirs) in enumerate(zip(*results, strict=True)):
            error = relative_error(ours, theirs)
            assert error <= TOLERANCE, f"value {position} is off by {error:.1e} at batch {batch}"


def _kept(model: nn.Module, given: tuple[Tensor, ...]) -> list[Any]:
    """Outputs, then the inputs as the run left them."""
    given = tuple(one.clone() for one in given)
    with torch.no_grad():
        return [*model(*given), *given]
