"""Capture by running: for models torch.export cannot trace (data-dependent control flow, odd Python).

    ModelCase on a real device ──one forward under a dispatch mode──> Recorder(ops)

The ops seen are those below autograd, so a few composite ones arrive decomposed (linear as addmm or mm, matmul as
bmm); the FLOPs are the same. Only the path taken by these inputs is seen: the workload's notes say so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path

from ..core.errors import NeedsWeightsError
from .case import ModelCase
from .exported import is_cache
from .recorder import Recorder, base_name


class RecordingMode(TorchDispatchMode):
    """Hands every operator call to a Recorder, with the module it happened in."""

    def __init__(self, recorder: Recorder, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.stack: list[str] = [""]
        self.counts: dict[str, int] = {}
        self.hooks: list[Any] = []
        for path, child in module.named_modules():
            self.hooks.append(child.register_forward_pre_hook(lambda _m, _a, path=path: self.stack.append(path)))
            self.hooks.append(child.register_forward_hook(lambda _m, _a, _r: self._leave(), always_call=True))

    def _leave(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.recorder.call(self.next_name(func), self.stack[-1], func, args, kwargs or {}, result)
        return result

    def next_name(self, func: Any) -> str:
        """`relu`, `relu_1`, `relu_2` …: the naming torch.export uses."""
        base = base_name(func)
        seen = self.counts.get(base, 0)
        self.counts[base] = seen + 1
        return f"{base}_{seen}" if seen else base

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()


def record_run(case: ModelCase) -> Recorder:
    """Run the model once and record what it did."""
    tensors = [*case.module.parameters(), *case.module.buffers()]
    if any(t.is_meta for t in tensors):
        raise NeedsWeightsError(
            f"{case.name} cannot be captured on the meta device",
            why="torch.export failed and running it needs real weights",
            do="build the model on the CPU and pass it to capture(), or make it exportable",
        )
    recorder = Recorder()
    for tensor in tensors:
        recorder.bind(tensor, "weights")
    for path, leaf in tree_flatten_with_path((case.args, case.kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            named = any(is_cache(str(getattr(key, "key", ""))) for key in path)
            recorder.bind_input(leaf, "kv_cache" if named else "activations")
    with torch.no_grad(), RecordingMode(recorder, case.module):
        case.module(*case.args, **case.kwargs)
    return recorder
