"""A model from the user's own Python: `path/to/file.py:function` in, ModelCase out.

    file.py ──import──> function(batch=, dtype=, device=, phase=, context=) ──> (module, inputs) or ModelCase
      only keywords the function has are passed: a torch.dtype, a device as text, else numbers and text

The file is run, because the user asked for it by name; nothing else is. It is built under the meta device first, where
nothing is allocated; a function that cannot work there is called again on the CPU, with a warning. A dtype the function
does not take is applied to what it returns; other options it does not take are errors. While the file runs its folder is
first on sys.path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..core.errors import CaptureError, ModelFileError, OptionError, RidgelineError, UnknownNameError, unknown_name
from .capture import RUNNABLE, module_case
from .case import CaseOptions, ModelCase

if TYPE_CHECKING:
    from torch import nn

KEYWORDS = ("batch", "dtype", "device", "phase", "context")
PREFIX = "ridgeline_factory_"

# Module name → folder of the factory that imported it. They stay importable, because torch.compile and imports inside
# forward() look them up again, until a factory of another folder, with perhaps its own module of that name, is built.
_imported: dict[str, Path] = {}


def build_factory(spec: str, options: CaseOptions) -> ModelCase:
    """Run `file.py:function` and wrap what it returns, in eval mode, on `options.device`."""
    path, _, name = spec.rpartition(":")
    file = Path(path)
    if not file.is_file():
        why = "it is a folder" if file.is_dir() else "no such file"
        raise ModelFileError(f"cannot open {path}", why=why, do="give path/to/file.py:function")
    with _own_imports(file.resolve().parent):
        factory = _function(file, name, spec)
        accepted = _accepted(factory)
        _refuse_untaken(spec, options, accepted)
        case = _on_device(factory, spec, options, accepted)
    case.module.eval().requires_grad_(False)
    return case


@contextmanager
def _own_imports(folder: Path) -> Iterator[None]:
    """Imports from the file's folder work inside; modules another factory brought from elsewhere do not stand in for them."""
    for name in [name for name, home in _imported.items() if home != folder]:
        sys.modules.pop(name, None)
        del _imported[name]
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        _imported.update({name: folder for name in set(sys.modules) - modules if _is_beside(sys.modules[name], folder)})


def _is_beside(module: ModuleType, folder: Path) -> bool:
    origin = getattr(module, "__file__", None)
    if not origin or module.__name__.startswith(PREFIX) or "site-packages" in origin:
        return False
    return Path(origin).resolve().is_relative_to(folder)


def _function(file: Path, name: str, spec: str) -> Callable[..., Any]:
    module = _run_file(file, spec)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__ and callable(value)]
    if not hasattr(module, name):
        if not own:
            raise UnknownNameError(f"unknown factory {name!r}", why=f"{file} defines no function", do=f"define {name}() in it")
        raise unknown_name("factory", name, own, see=str(file))
    factory = getattr(module, name)
    if not callable(factory):
        what = f"{spec} is a {type(factory).__name__}"
        raise ModelFileError(what, why="a factory is a function that builds a model", do="name a function of the file")
    return factory  # type: ignore[no-any-return]


def _run_file(file: Path, spec: str) -> ModuleType:
    # The path is part of the name, so that model.py of two folders are two modules.
    name = f"{PREFIX}{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ModelFileError(f"cannot open {file}", why="not a Python file", do="give path/to/file.py:function")
    module = importlib.util.module_from_spec(found)
    # Dataclasses and torch look a class's module up by name while the file still runs.
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(f"{file} cannot be imported", error, file) from error
    return module


def _accepted(factory: Callable[..., Any]) -> frozenset[str]:
    """The keywords among ours that the function takes."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(KEYWORDS)
    return frozenset(p.name for p in parameters if p.name in KEYWORDS and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _refuse_untaken(spec: str, options: CaseOptions, accepted: frozenset[str]) -> None:
    if options.dtype is not None and options.dtype not in RUNNABLE:
        raise OptionError(
            f"dtype {options.dtype} for {spec}", why="torch modules do not compute in it", do=f"give one of {', '.join(RUNNABLE)}"
        )
    for name in ("batch", "phase", "context"):
        value = getattr(options, name)
        if value is not None and name not in accepted:
            raise OptionError(
                f"{name} {value!r} for {spec}", why=f"the function takes no {name}", do=f"add a keyword parameter {name}, or leave it out"
            )


def _on_device(factory: Callable[..., Any], spec: str, options: CaseOptions, accepted: frozenset[str]) -> ModelCase:
    if options.device != "meta":
        return _moved(_call(factory, spec, options, accepted), options.device)
    try:
        case = _call(factory, spec, options, accepted)
        if not any(not t.is_meta for t in (*case.module.parameters(), *case.module.buffers())):
            return _moved(case, "meta")
        reason = ""  # it chose a real device, or read real weights: build all of it there
    except CaptureError as error:
        reason = error.why
    case = _moved(_call(factory, spec, replace(options, device="cpu"), accepted), "cpu")
    if reason:
        warnings.warn(f"{spec} cannot be built on the meta device ({reason}); built on the CPU", stacklevel=2)
    return case


def _call(factory: Callable[..., Any], spec: str, options: CaseOptions, accepted: frozenset[str]) -> ModelCase:
    import torch

    given: dict[str, Any] = {name: value for name in accepted if (value := getattr(options, name)) is not None}
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    try:
        with torch.device(options.device):
            result = factory(**given)
    except RidgelineError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(f"{spec} failed", error, Path(spec.rpartition(":")[0])) from error
    case = _wrap(result, spec, options)
    return _cast(case, options.dtype) if options.dtype and "dtype" not in accepted else case


def _wrap(result: Any, spec: str, options: CaseOptions) -> ModelCase:
    import torch

    if isinstance(result, ModelCase):
        return result
    pair = result if isinstance(result, list | tuple) and len(result) == 2 else (None, None)
    if not isinstance(pair[0], torch.nn.Module) or not isinstance(pair[1], torch.Tensor | list | tuple | dict):
        returned = f"({', '.join(type(part).__name__ for part in result)})" if isinstance(result, list | tuple) else type(result).__name__
        raise CaptureError(
            f"{spec} returned {returned}",
            why="a factory returns (module, inputs), the inputs a tensor, a tuple or a dict",
            do="return e.g. (model, torch.randn(batch, 3, 224, 224))",
        )
    path, _, function = spec.rpartition(":")
    case = module_case(pair[0], pair[1], f"{Path(path).name}:{function}")
    return replace(case, batch=options.batch or case.batch, phase=options.phase, context=options.context)


def _cast(case: ModelCase, dtype: str) -> ModelCase:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    args, kwargs = _map_tensors(case, lambda t: t.to(kind) if t.is_floating_point() else t)
    return replace(case, module=case.module.to(kind), args=args, kwargs=kwargs, dtype=dtype)


def _moved(case: ModelCase, device: str) -> ModelCase:
    args, kwargs = _map_tensors(case, lambda t: t.to(device))
    module: nn.Module = case.module.to(device)
    return replace(case, module=module, args=args, kwargs=kwargs)


def _map_tensors(case: ModelCase, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch
    from torch.utils._pytree import tree_map_only

    mapped: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(torch.Tensor, function, (case.args, case.kwargs))
    return mapped


def _raised(what: str, error: BaseException, file: Path) -> CaptureError:
    """The user's own exception, with the line of their file it came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()]
    where = f" (line {lines[-1]})" if lines else ""
    text = str(error).strip().splitlines()
    return CaptureError(
        what, why=f"{type(error).__name__}: {text[0][:200] if text else 'no message'}{where}", do=f"run {file} on its own to see it all"
    )
