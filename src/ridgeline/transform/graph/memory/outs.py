"""Find, for one call, an op that writes its result where it is told and gives the same bits.

    node + its arguments + its result ──candidates──> schema's out overload (add.Tensor ──> add.out), or a known equal:
        linear ──> addmm.out | mm.out on flattened views     relu ──> clamp_min.out(0)      embedding ──> index_select.out
        batch_norm ──> native_batch_norm.out    pad ──> fill_, copy_    to(dtype), contiguous, clone, reshape that copies ──> copy_
      ──tried twice (these arguments, random ones), results compared bit by bit──> Writer, or None: no out variant

A candidate that differs in one bit (adaptive_avg_pool2d.out to 1x1 does not take the mean that the op takes, but sums in
another order) is not used. What a Writer allocates of its own is not decided here but measured: workspace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..edit import is_random
from .facts import tensors_in

aten = torch.ops.aten
Writer = Callable[[tuple[Any, ...], dict[str, Any], Sequence[torch.Tensor]], None]
"""Called with the node's arguments and the tensors to write: one for each tensor of its result."""
FACTORY = {"dtype", "layout", "device", "pin_memory"}  # an out overload takes these from the place it fills
COPIES = (aten.to, aten.contiguous, aten.clone, aten.reshape, aten._to_copy, aten.flatten, aten.type_as, aten.alias_copy)


def find_writer(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Writer | None:
    """The first candidate that writes exactly what the op returns."""
    expected = tensors_in(result)
    if is_random(node) or not _whole(result) or not all(_writable(tensor) for tensor in expected):
        return None
    for writer in _candidates(node, args, kwargs):
        if _agrees(writer, args, kwargs, expected) and _agrees_on_random(writer, node, args, kwargs):
            return writer
    return None


def overwritable(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, ...]:
    """Positions of arguments that the writer may write its result over; tried, for elementwise ops only."""
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or getattr(node.target, "overloadpacket", None) is aten.batch_norm
    if not elementwise or not isinstance(result, torch.Tensor):
        return ()
    found = []
    for position, source in enumerate(args):
        if not isinstance(source, torch.Tensor) or (source.dtype, source.shape, source.stride()) != (
            result.dtype,
            result.shape,
            result.stride(),
        ):
            continue
        place = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device).copy_(source)
        try:
            writer(tuple(place if argument is source else argument for argument in args), kwargs, [place])
        except RuntimeError:
            continue
        if same_bits(place, result):
            found.append(position)
    return tuple(found)


def _whole(result: Any) -> bool:
    """Whether the result is one tensor, or a flat tuple of them."""
    return isinstance(result, torch.Tensor) or (isinstance(result, tuple) and all(isinstance(item, torch.Tensor) for item in result))


def _writable(tensor: torch.Tensor) -> bool:
    """Whether every element has a place of its own (an expanded tensor's do not)."""
    strided = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
    return strided and all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _candidates(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Writer]:
    packet = getattr(node.target, "overloadpacket", None)
    known = KNOWN.get(packet)
    if known is not None:
        yield known
    if packet in COPIES and args and isinstance(args[0], torch.Tensor):
        yield _copy
    overload = out_overload(node.target)
    if overload is not None:
        yield _by_schema(overload)


def out_overload(target: Any) -> Any:
    """The overload with the same arguments and one `out` argument for each result, found by schema."""
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return None
    every = [(argument.name, str(argument.type)) for argument in schema.arguments]
    for wanted in (every, [argument for argument in every if argument[0] not in FACTORY]):
        for name in target.overloadpacket.overloads():
            overload = getattr(target.overloadpacket, name)
            arguments = overload._schema.arguments
            given = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
            if len(arguments) - len(given) == len(schema.returns) > 0 and given == wanted:
                return overload
    return None


def _by_schema(overload: Any) -> Writer:
    arguments = overload._schema.arguments
    outs = [argument.name for argument in arguments if argument.is_out]
    taken = {argument.name for argument in arguments}

    def write(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
        overload(*args, **{name: value for name, value in kwargs.items() if name in taken}, **dict(zip(outs, places, strict=True)))

    return write


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
    """An op that only copies: the elements in order, in the dtype and strides of the place."""
    source, place = args[0], places[0]
    (place if place.shape == source.shape else place.view(source.shape)).copy_(source)


def _relu(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
    aten.clamp_min.out(args[0], 0, out=places[0])


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
    """Rows times the transposed weight, as torch does it for any number of dimensions."""
    source, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    rows, out = source.view(-1, source.shape[-1]), places[0].view(-1, weight.shape[0])
    if bias is None:
        aten.mm.out(rows, weight.t(), out=out)
    else:
        aten.addmm.out(bias, rows, weight.t(), out=out)


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
    """Batched products of equal batches, as torch does them."""
    left, right = args
    if left.dim() != right.dim() or left.dim() < 3 or left.shape[:-2] != right.shape[:-2]:
        raise ValueError("not a plain batched product")
    batch = left.shape[:-2].numel()
    out = places[0].view(batch, *places[0].shape[-2:])
    aten.bmm.out(left.reshape(batch, *left.shape[-2:]), right.reshape(batch, *right.shape[-2:]), out=out)


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
    weight, indices = args[0], args[1]
    aten.index_select.out(weight, 0, indices.view(-1), out=places[0].view(-1, weight.shape[1]))


def _pad(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
    """A constant border around the source; pairs of (before, after), last dimension first."""
    source, pairs, place = args[0], args[1], places[0]
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    value = args[3] if len(args) > 3 else kwargs.get("value")
    if mode != "constant" or min(pairs) < 0:
        raise ValueError("not a plain border")
    inner = place.fill_(0 if value is None else value)
    for position in range(len(pairs) // 2):
        dimension = source.dim() - 1 - position
        inner = inner.narrow(dimension, pairs[2 * position], source.shape[dimension])
    inner.copy_(source)


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[torch.Tensor]) -> None:
    """Inference only: the statistics are given."""
    source, weight, bias, mean, variance, training, momentum, eps = args[:8]
    if training:
        raise ValueError("batch norm in training")
    saved = source.new_empty(0), source.new_empty(0)
    aten.native_batch_norm.out(
        source, weight, bias, mean, variance, False, momentum, eps, out=places[0], save_mean=saved[0], save_invstd=saved[1]
    )


KNOWN: dict[Any, Writer] = {
    aten.relu: _relu,
    aten.linear: _linear,
    aten.matmul: _matmul,
    aten.embedding: _embedding,
    aten.batch_norm: _batch_norm,
    aten.pad: _pad,
}


def _agrees(writer: Writer, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Sequence[torch.Tensor]) -> bool:
    """Whether the writer fills places full of rubbish with exactly the expected bits."""
    places = [_rubbish_like(tensor) for tensor in expected]
    before = [(place.data_ptr(), place.shape, place.stride()) for place in places]
    try:
        writer(args, kwargs, places)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return False
    same_place = before == [(place.data_ptr(), place.shape, place.stride()) for place in places]
    return same_place and all(same_bits(place, tensor) for place, tensor in zip(places, expected, strict=True))


def _agrees_on_random(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The same with other numbers: small examples agree by chance (all zero after a relu, one element)."""
    generator = torch.Generator().manual_seed(0)

    def other(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return value
        if not _writable(value):
            return value
        numbers = torch.randn(value.shape, generator=generator).abs_()
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(numbers)

    def fresh(sources: Any, values: Any) -> Any:
        # Weights stay: they are large, and the same in every run.
        return values if isinstance(sources, fx.Node) and sources.op == "get_attr" else pytree.tree_map(other, values)

    args = tuple(fresh(source, value) for source, value in zip(node.args, args, strict=True))
    kwargs = {name: fresh(node.kwargs[name], value) for name, value in kwargs.items()}
    try:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        return False
    return _agrees(writer, args, kwargs, tensors_in(result))


def _rubbish_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the same strides, every byte 255: NaN in every float."""
    bytes_needed = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    ) * tensor.element_size()
    memory = torch.full((bytes_needed,), 255, dtype=torch.uint8, device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit (NaN equals the same NaN, 0 is not -0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_complex():
        return same_bits(torch.view_as_real(left), torch.view_as_real(right))
    integer = INTEGERS[left.element_size()]
    return (
        torch.equal(left.view(integer), right.view(integer))
        if left.dim()
        else torch.equal(left.view(1).view(integer), right.view(1).view(integer))
    )
