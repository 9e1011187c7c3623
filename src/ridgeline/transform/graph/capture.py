"""A module and example inputs in, an fx graph of aten ops out, ready for passes.

    model.eval(), inputs ──torch.export, dim 0 a symbol──> program ──unlift──> weights are attributes again
       ──clean──> wrappers of no_grad and autocast(False) inlined, guards and asserts gone ──verify──> Captured

Placeholders are the user's tensors, positional arguments first, then keyword arguments, named after the parameters of
`forward`: `graph.module(x, mask)` and `graph.module(input_ids=x, attention_mask=mask)` both work. A tensor inside a tuple
or dict argument is a placeholder of its own; arguments that are no tensors are closed over with the example's value.
The output node holds a flat tuple; the module returns the user's structure (`graph.process_outputs` makes it).
Ops are pre-dispatch: conv2d, linear, batch_norm, scaled_dot_product_attention stay whole. Inference only.

Limits: the batch is dim 0, of every input that shares the first one's; where export cannot keep it open (a size the
model computes with in Python), the graph is for the example's sizes and `notes` says so. Weights are shared with the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from ...core.errors import TransformError
from ...workload.exported import quiet
from .clean import clean_graph


@dataclass(slots=True)
class Captured:
    """A model's graph; passes edit `module` in place."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]  # example tensors, one for each placeholder
    batch_dynamic: bool  # whether dim 0 may vary
    notes: tuple[str, ...] = ()

    @property
    def batch(self) -> int:
        """Dim 0 of the first example input whose dim 0 is open, else of the first that has one; 1 where there is none."""
        nodes = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        opened = tuple(one for node, one in zip(nodes, self.inputs, strict=True) if _is_open(node.meta["val"]))
        return batch_of(opened or self.inputs)

    def copy(self) -> Captured:
        """The same graph to change apart from this one; the weights are shared."""
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.module.graph, values)
        last = next(node for node in reversed(self.module.graph.nodes) if node.op == "output")
        graph.output(result).meta.update(last.meta)
        graph.set_codegen(self.module.graph._codegen)
        return Captured(fx.GraphModule(self.module, graph), self.inputs, self.batch_dynamic, self.notes)


def _is_open(value: torch.Tensor) -> bool:
    return value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)


def batch_of(tensors: tuple[Any, ...]) -> int:
    return next((int(tensor.shape[0]) for tensor in tensors if tensor.dim()), 1)


def capture_graph(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, dynamic_batch: bool = True
) -> Captured:
    """The model's graph for inference at these inputs, checked to give the model's answers; the model is left as it was."""
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    given = dict(kwargs or {})
    named = {name: value for name, value in given.items() if _tensors(value)}
    plain = {name: value for name, value in given.items() if name not in named}
    with _evaluating(model), torch.no_grad(), quiet():
        try:
            with _closed_over(model, plain):
                return _capture(model, inputs, named, dynamic_batch)
        except TransformError as error:
            # Hugging Face decoders return a cache object nobody asked for, and torch.export knows no such output.
            if "Cache" not in error.why or "use_cache" in plain or not hasattr(getattr(model, "config", None), "use_cache"):
                raise
        with _closed_over(model, {**plain, "use_cache": False}):
            found = _capture(model, inputs, named, dynamic_batch)
    found.notes = ("captured with use_cache=False: the graph returns no key-value cache", *found.notes)
    return found


def _capture(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], dynamic_batch: bool) -> Captured:
    """With an open batch if that can be had, else for the example's sizes."""
    tensors = _tensors((inputs, kwargs))
    notes: tuple[str, ...] = ()
    dims = sorted({min(tensor.dim(), 2) for tensor in tensors if tensor.dim()}) if dynamic_batch else []
    for least_dims in dims:  # first every input, then without vectors: those may be positions
        try:
            return _capture_once(model, inputs, kwargs, tensors, least_dims)
        except Exception as error:
            notes = (f"only for batch {batch_of(tensors)}: {_first_line(error)}",)
    try:
        found = _capture_once(model, inputs, kwargs, tensors, None)
    except TransformError:
        raise
    except Exception as error:
        raise TransformError(
            f"{type(model).__name__} cannot be captured as one graph",
            why=_first_line(error),
            do="make its forward free of branches on tensor values, or optimise its parts one by one",
        ) from error
    found.notes = notes
    return found


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in a structure, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _capture_once(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[torch.Tensor, ...], least_dims: int | None
) -> Captured:
    """Export, unlift, clean and verify; dim 0 is open in inputs of at least so many dimensions (None: in none)."""
    shapes = None
    args, named = inputs, kwargs
    if least_dims is not None:
        args, named, shapes = _open_batch(inputs, kwargs, batch_of(tuple(one for one in tensors if one.dim() >= least_dims)), least_dims)
    program = torch.export.export(model, args, named or None, dynamic_shapes=shapes, strict=False)
    lifted = program.module(check_guards=False)
    if not isinstance(lifted, fx.GraphModule):
        raise TypeError(f"torch.export gave a {type(lifted).__name__}")
    clean_graph(lifted)
    captured = Captured(_flat_signature(lifted), tensors, least_dims is not None)
    _verify(captured, model, inputs, kwargs)
    return captured


def _open_batch(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], batch: int, least_dims: int
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The same inputs with a batch of at least 2 (export takes a size of 1 for a constant) and a symbol for it."""
    dim = torch.export.Dim("batch", min=1)
    shapes = torch.export.ShapesCollection()

    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < least_dims or leaf.shape[0] != batch:
            return leaf
        larger = torch.cat([leaf, leaf]) if batch == 1 else leaf.view_as(leaf)
        if batch == 1 and leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last) and not leaf.is_contiguous():
            larger = larger.contiguous(memory_format=torch.channels_last)
        shapes[larger] = {0: dim}
        return larger

    args, named = pytree.tree_map(opened, (inputs, kwargs))
    return args, named, shapes


def _flat_signature(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with tensors only as placeholders and the user's output structure; attributes nobody uses are gone."""
    graph = module.graph
    codegen = graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen):
        raise TypeError("torch.export gave a graph without an output structure")
    for node in list(graph.nodes):
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor):
            if node.users:
                raise TypeError(f"the graph depends on the number or object given as {node.target}")
            graph.erase_node(node)
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    spec = pytree.tree_structure((tuple(0 for _ in names), {}))
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, spec, codegen.pytree_info.out_spec)))
    graph.lint()
    return fx.GraphModule(module, graph)


def _verify(captured: Captured, model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The graph must give the model's answers, at the example's batch and, where it is open, at another."""
    from .check import fresh_inputs, outputs_of, relative_error, working_dtype

    if any(tensor.is_meta for tensor in captured.inputs):
        return
    own = working_dtype(captured)
    allowed = 1e-9 if own == torch.float64 else 100 * torch.finfo(own).eps
    for batch in (captured.batch, captured.batch + 2) if captured.batch_dynamic else (captured.batch,):
        tensors = fresh_inputs(captured, batch, seed=batch)
        expected = outputs_of(model, *_refilled(inputs, kwargs, tensors))
        found = outputs_of(captured.module, tensors, {})
        if len(found) != len(expected):
            raise TransformError(
                f"the graph has {len(found)} outputs, the model {len(expected)}",
                why="the model's outputs depend on more than its inputs",
                do="return tensors only",
            )
        for position, (ours, reference) in enumerate(zip(found, expected, strict=True)):
            error = relative_error(ours, reference)
            if not error <= allowed:
                raise TransformError(
                    f"output {position} of the graph is {error:.1e} off the model's at batch {batch}",
                    why="torch.export recorded something else than the model does",
                    do="report the model; its forward may depend on state outside itself",
                )


def _refilled(inputs: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The user's arguments with these tensors in place of the example's."""
    leaves, spec = pytree.tree_flatten((inputs, kwargs))
    fresh = iter(tensors)
    args, named = pytree.tree_unflatten([next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
    return args, named


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """eval() for a while, every part back to its own mode after."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def _closed_over(model: nn.Module, plain: dict[str, Any]) -> Iterator[None]:
    """For a while `model.forward` has these keyword arguments filled in; export then sees tensors only."""
    if not plain:
        yield
        return
    before = model.__dict__.get("forward")
    model.forward = functools.partial(model.forward, **plain)
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before


def _first_line(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
