"""How fast could this model run here, why doesn't it, and what would make it?

    workload = capture(model, inputs)        # what must be computed; also capture("resnet18"), capture("model.onnx")
    target   = load_target("h200")           # what computes it; also "cpu" (this machine) or "./mychip.toml"
    profile  = estimate(workload, target)    # how long each op must take, and what limits it [s, B, FLOP]
    network  = map_layers(workload, load_target("eyeriss"))    # on a spatial array: the best mapping of every layer
    profile  = measure(model, inputs)        # how long it does take: the same rows, measured
    advice   = advise(profile)               # what would pay, each change estimated again
    kernels  = use_kernels(model)            # our Triton kernels in place of torch's, where they were measured to win
    history  = fit(model, load_data("digits"), epochs=8); scores = evaluate(model, data)    # one training loop, one scorer
    model, change = optimize(model, inputs)      # the same answers from fewer operators: graph passes, each checked; memory planned
    model, change = quantize(model, data=data)   # also prune, low_rank, distill: bytes, latency and quality before and after
    analog   = to_crossbar(model, "rram-64")     # a module that behaves as the chip would; also evaluate_chips, diagnose_crossbar, …
    front    = search("nb201", "digits", target="h200", objectives="accuracy,latency", budget="10m")    # an architecture, found and trained
    engine   = Engine.from_pretrained("builtin"); engine.generate(["First"], Sampling(max_tokens=64))    # text, many requests at once

`import ridgeline` imports nothing but this file: each public name is fetched from its module when first used. Three of them,
`estimate`, `measure` and `search`, are rooms (sub-packages) as well. The function has the name; see `_Api` for how both are reached.
"""

from __future__ import annotations

import importlib
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.change import Change
    from .core.errors import RidgelineError
    from .core.profile import Profile
    from .crossbar.layer.calibrate import calibrate_ as calibrate_crossbar
    from .crossbar.layer.convert import to_crossbar
    from .crossbar.study.chips import evaluate_chips
    from .crossbar.study.diagnose import diagnose as diagnose_crossbar
    from .crossbar.study.sweep import sweep as sweep_crossbar
    from .estimate.advice import advise
    from .estimate.processor import estimate
    from .estimate.spatial.network import map_layers
    from .kernel.use import use_kernels
    from .llm.engine.engine import Engine
    from .llm.sampling import Sampling
    from .measure.profiler import measure
    from .measure.regions import profile_op
    from .search.study.search import search
    from .target.calibrate import calibrate
    from .target.load import load_target
    from .train.evaluate import evaluate
    from .train.fit import fit
    from .transform.distil import distill
    from .transform.factor.step import low_rank
    from .transform.graph.optimize import optimize
    from .transform.prune.step import prune
    from .transform.quantise.step import quantize
    from .transform.saved import load_model, save_model
    from .workload.capture import capture
    from .workload.data import load_data
    from .workload.graph import Workload
    from .workload.pretrained import load_pretrained

__version__ = "0.1.0"

__all__ = [
    "Change",
    "Engine",
    "Profile",
    "RidgelineError",
    "Sampling",
    "Workload",
    "__version__",
    "advise",
    "calibrate",
    "calibrate_crossbar",
    "capture",
    "diagnose_crossbar",
    "distill",
    "estimate",
    "evaluate",
    "evaluate_chips",
    "fit",
    "load_data",
    "load_model",
    "load_pretrained",
    "load_target",
    "low_rank",
    "map_layers",
    "measure",
    "optimize",
    "profile_op",
    "prune",
    "quantize",
    "save_model",
    "search",
    "sweep_crossbar",
    "to_crossbar",
    "use_kernels",
]

_HOMES = {
    "Change": ".core.change",
    "Engine": ".llm.engine.engine",
    "Profile": ".core.profile",
    "RidgelineError": ".core.errors",
    "Sampling": ".llm.sampling",
    "Workload": ".workload.graph",
    "advise": ".estimate.advice",
    "calibrate": ".target.calibrate",
    "calibrate_crossbar": ".crossbar.layer.calibrate:calibrate_",
    "capture": ".workload.capture",
    "diagnose_crossbar": ".crossbar.study.diagnose:diagnose",
    "distill": ".transform.distil",
    "estimate": ".estimate.processor",
    "evaluate": ".train.evaluate",
    "evaluate_chips": ".crossbar.study.chips",
    "fit": ".train.fit",
    "load_data": ".workload.data",
    "load_model": ".transform.saved",
    "load_pretrained": ".workload.pretrained",
    "load_target": ".target.load",
    "low_rank": ".transform.factor.step",
    "map_layers": ".estimate.spatial.network",
    "measure": ".measure.profiler",
    "optimize": ".transform.graph.optimize",
    "profile_op": ".measure.regions",
    "prune": ".transform.prune.step",
    "quantize": ".transform.quantise.step",
    "save_model": ".transform.saved",
    "search": ".search.study.search",
    "sweep_crossbar": ".crossbar.study.sweep:sweep",
    "to_crossbar": ".crossbar.layer.convert",
    "use_kernels": ".kernel.use",
}
"""The module of each public name, and after a colon what it is called there, where that differs."""


class _Api(ModuleType):
    """Keeps a public name for its function when the import system binds the room of the same name.

    Importing `ridgeline.estimate.processor` ends with setattr(ridgeline, "estimate", <the package>), which would hide the
    function from then on. That binding is dropped; the package stays in sys.modules, where `from` imports find it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, there = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(home, __name__), there or name)
    room = sys.modules.get(f"{__name__}.{name}")
    if room is not None and isinstance(value, FunctionType):
        # `import ridgeline.estimate.processor as p` looks for `processor` on whatever `ridgeline.estimate` is, so the
        # function shares the room's namespace: `ridgeline.estimate(...)` and `ridgeline.estimate.processor` both work.
        vars(room).update(vars(value))
        value.__dict__ = vars(room)
    return value  # not kept: a module's own attribute stays the only copy, so a patched one is seen here too


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Api
