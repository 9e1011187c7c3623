"""What one run of a graph shows about its memory: which storage every tensor looks at, how large, and who made it.

    Captured ──observe──> Facts: for every node its tensors (storage, size, stride), for every storage its bytes and maker

The run is real: it shows what `reshape` copies and what `to` returns as it is, on this machine. (Of a model on the meta
device it shows the sizes.) Inputs are cloned, and weights that the graph writes are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ....core.errors import TransformError
from ..edit import attribute, written_arguments

if TYPE_CHECKING:
    from ..capture import Captured

ARENA, OUTPUT, INPUT, WEIGHT = "arena", "output", "input", "weight"
Visit = Callable[[fx.Node, tuple[Any, ...], dict[str, Any], Any], None]


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One tensor of a node's value: which storage it looks at, and how."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements
    dtype: torch.dtype
    plain: bool  # False: conjugated, negated or not strided; cannot be made again from size and stride


@dataclass(frozen=True, slots=True)
class StorageFact:
    """One piece of memory."""

    bytes: int
    home: str  # "input", "weight" or "arena" (made by the graph; `homes` tells which of those leave it)
    maker: str  # name of the node
    device: torch.device


@dataclass(slots=True)
class Facts:
    """What one run showed. Keyed by node name: reordering keeps it true."""

    tensors: dict[str, tuple[TensorFact, ...]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # each node's value with TensorFacts for tensors: numbers, tuples, one tensor
    storages: list[StorageFact] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # storages some op writes into
    reused: dict[str, int] = field(default_factory=dict)  # node → the storage of an argument that its result takes over (reuse.py)

    def made_by(self, name: str) -> tuple[int, ...]:
        """The storages a node made."""
        mine = dict.fromkeys(tensor.storage for tensor in self.tensors.get(name, ()))
        return tuple(storage for storage in mine if self.storages[storage].maker == name or self.reused.get(name) == storage)


def observe(captured: Captured, visit: Visit | None = None) -> Facts:
    """Run the graph once on its example inputs and note every storage; `visit` sees each call with its arguments and result."""
    run = _Run(captured, visit)
    try:
        with torch.no_grad():
            run.all()
    finally:
        run.restore()
    return run.facts


class _Run:
    """One run of the graph: values are dropped after their last use, so it needs no more memory than the model does."""

    def __init__(self, captured: Captured, visit: Visit | None) -> None:
        self.module, self.visit, self.facts = captured.module, visit, Facts()
        self.inputs = iter(self.module.graph.process_inputs(*pytree.tree_map(_clone, captured.inputs)))
        self.env: dict[fx.Node, Any] = {}
        self.known: dict[int, list[int]] = {}  # address of a storage → [its number, how many values look at it]
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def all(self) -> None:
        nodes = list(self.module.graph.nodes)
        last_use = {source: node for node in nodes for source in node.all_input_nodes}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for source, node in last_use.items():
            dying.setdefault(node, []).append(source)
        for node in nodes:
            if node.op == "output":
                continue
            self.env[node] = value = self.step(node)
            self.note(node, value)
            del value
            for gone in (*dying.get(node, ()), *(() if node in last_use else (node,))):
                if gone.op == "call_function":
                    self.forget(self.env.pop(gone))

    def step(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return next(self.inputs)
        if node.op == "get_attr":
            return attribute(self.module, str(node.target))
        if node.op != "call_function" or not callable(node.target):
            raise TransformError(
                f"node {node.name} is a {node.op}",
                why="memory is planned for graphs of calls to torch ops",
                do="plan a graph that capture_graph made",
            )
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        _refuse_data_dependent(node, args)
        self.protect(node)
        result = node.target(*args, **kwargs)
        if self.visit is not None:
            self.visit(node, args, kwargs, result)
        return result

    def protect(self, node: fx.Node) -> None:
        """Before an op writes into something, note that; keep a copy where it is the model's own."""
        for target in written_arguments(node):
            for tensor in tensors_in(self.env[target]):
                number = self.number(tensor)
                if number is None:
                    continue
                if self.facts.storages[number].home == WEIGHT and number not in self.facts.written:
                    whole = flat(tensor)
                    self.saved.append((whole, whole.clone()))
                self.facts.written.add(number)

    def restore(self) -> None:
        with torch.no_grad():
            for place, old in self.saved:
                place.copy_(old)

    def number(self, tensor: torch.Tensor) -> int | None:
        found = self.known.get(address(tensor))
        return None if found is None else found[0]

    def note(self, node: fx.Node, value: Any) -> None:
        """Record the tensors of a value; storages not seen before are this node's."""
        home = {"placeholder": INPUT, "get_attr": WEIGHT}.get(node.op, ARENA)
        facts = []
        for tensor in tensors_in(value):
            key = address(tensor)
            if key not in self.known:
                self.known[key] = [len(self.facts.storages), 0]
                self.facts.storages.append(StorageFact(storage_bytes(tensor), home, node.name, tensor.device))
            self.known[key][1] += 1
            facts.append(tensor_fact(tensor, self.known[key][0]))
        self.facts.tensors[node.name] = tuple(facts)
        rest = iter(facts)
        self.facts.values[node.name] = pytree.tree_map(lambda leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf, value)

    def forget(self, value: Any) -> None:
        """Torch gives the address of a freed storage to a later one: those must not be taken for the same."""
        for tensor in tensors_in(value):
            key = address(tensor)
            self.known[key][1] -= 1
            if not self.known[key][1]:
                del self.known[key]


def _refuse_data_dependent(node: fx.Node, args: tuple[Any, ...]) -> None:
    """Ops whose result size or value as a number depends on the data cannot be planned; indexing does so only by a mask."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.dynamic_output_shape not in tags and torch.Tag.data_dependent_output not in tags:
        return
    indexing = getattr(node.target, "overloadpacket", None) in (torch.ops.aten.index, torch.ops.aten._unsafe_index)
    if indexing and not any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])):
        return
    raise TransformError(
        f"{node.target} at {node.name} has a size or number that depends on the data",
        why="a memory plan holds for sizes known before the run",
        do="run this model without the static runner",
    )


def tensor_fact(tensor: torch.Tensor, storage: int) -> TensorFact:
    """How a tensor looks at its storage."""
    if tensor.layout != torch.strided:
        return TensorFact(storage, tuple(tensor.shape), (), 0, tensor.dtype, False)
    plain = not (tensor.is_conj() or tensor.is_neg()) and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return TensorFact(storage, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, plain)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, in pytree order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; opaque tensors (oneDNN weights) stand for themselves."""
    return id(tensor) if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage a tensor looks at."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as one row of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor.detach(), (count,), (1,), 0)


def copied(facts: Facts, copies: Mapping[str, str]) -> Facts:
    """Facts of a graph in which node `new` does again what `old` did ({new: old}): the same sizes, storages of their own."""
    tensors, values, storages = dict(facts.tensors), dict(facts.values), list(facts.storages)
    fresh: dict[int, int] = {}  # a copied view looks at the copy of its storage: makers come before views in `copies`
    for new, old in copies.items():
        for storage in facts.made_by(old):
            fresh[storage] = len(storages)
            storages.append(replace(facts.storages[storage], maker=new))
        tensors[new] = tuple(replace(tensor, storage=fresh.get(tensor.storage, tensor.storage)) for tensor in facts.tensors[old])
        rest = iter(tensors[new])
        values[new] = pytree.tree_map(lambda leaf, rest=rest: next(rest) if isinstance(leaf, TensorFact) else leaf, facts.values[old])
    return Facts(tensors, values, storages, set(facts.written))


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
