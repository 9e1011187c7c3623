"""Pass "layout": channels-last or plain (NCHW) memory for every region, by measured cost.

    plan (layout/plan.py) ──saves at least `least_gain`?──> rewrite ──run once, look at the real strides──> keep
                                                                          │ an op answered in another order than planned
                                                                          └──> take it back, pin that op, plan again
    measured costs: the whole graph before and after, in turns; not faster ──> take it back, forget those timings

Values do not change but for the rounding of another kernel; outputs keep their strides. The plan is exact for the costs it was given
(layout/choose.py); it holds for the example's batch size, other batches get the same layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from ....core.errors import OptionError
from ..layout.choose import LAST
from ..layout.cost import Costs, costs_for
from ..layout.measure import time_both
from ..layout.order import EITHER, label_of, see
from ..layout.plan import Plan, make_plan
from ..layout.regions import Kind, main_tensor
from ..layout.rewrite import carry_out, constant_names, drop_unused_constants, output_arguments, restore_outputs
from ..manager import PassContext, PassResult, Site, register, site

if TYPE_CHECKING:
    from ..capture import Captured

ATTEMPTS = 4


@register("layout")
@dataclass(slots=True)
class Layout:
    """Converts where it saves at least `least_gain` of the region's time and `least_gain_s`; `costs`: given, else measured or estimated."""

    costs: Costs | None = None
    least_gain: float = 0.02
    least_gain_s: float = 20e-6  # less than this drowns in what calling a few ops from Python costs
    most_conversions: float = 0.1  # of the nodes; more would follow the noise of the timings
    name: ClassVar[str] = "layout"
    last: ClassVar[bool] = True

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        if why := _cannot(graph):
            return _refused(graph, why)
        try:
            costs = self.costs or costs_for(context.target, context.device)
        except OptionError as error:  # an array or a crossbar has no layouts of torch's
            return _refused(graph, f"{error.what}: {error.why}")
        pinned: frozenset[str] = frozenset()
        for _ in range(ATTEMPTS):
            plan = make_plan(graph, costs, pinned, self.most_conversions)
            costs.save()
            if plan is None:
                return _refused(graph, "no convolution, pool or norm on images that could run in either layout")
            context.report(f"layout: {plan.before_s * 1e3:.3f} ms as it is, {plan.after_s * 1e3:.3f} ms as planned")
            if why := self._not_worth_it(plan):
                return PassResult(refused=[_summary(plan, why)])
            before, summary = graph.copy(), _summary(plan, "")
            sites, wrong = _apply(graph, plan)
            if wrong is None:
                return _confirm(graph, before, plan, costs, [replace(summary, what=_figures(plan, sites)), *sites], context)
            _take_back(graph, before)
            if not wrong:
                break
            pinned = plan.pinned | wrong
        return _refused(graph, "ops kept answering in another order than planned")

    def _not_worth_it(self, plan: Plan) -> str | None:
        gain = 1 - plan.after_s / plan.before_s if plan.before_s else 0.0
        if plan.choice.labels == plan.before and not plan.converted:
            return "every op already has its faster layout"
        saved_s = plan.before_s - plan.after_s
        if gain < self.least_gain or saved_s < self.least_gain_s:
            least = f"less than {self.least_gain:.0%} or {self.least_gain_s * 1e6:.0f} us"
            return f"the best plan would save {max(gain, 0.0):.1%} ({max(saved_s, 0.0) * 1e6:.0f} us), {least}"
        return None


def _cannot(graph: Captured) -> str | None:
    """Why the graph cannot be touched at all."""
    if any("as_strided" in str(node.target) for node in graph.module.graph.nodes):
        return "as_strided reads memory by position"
    if any(getattr(tensor, "is_meta", False) for tensor in graph.inputs):
        return "the example inputs have no values: strides cannot be seen"
    return None


def _refused(graph: Captured, why: str) -> PassResult:
    return PassResult(refused=[site(list(graph.module.graph.nodes)[-1:], why)])


def _apply(graph: Captured, plan: Plan) -> tuple[list[Site], frozenset[str] | None]:
    """Rewrite and look: the sites and None; or the ops that did not do as planned."""
    old_outputs = [plan.seen.get(node) for node in output_arguments(graph)]
    sites = carry_out(graph, plan)
    try:
        now = see(graph)
    except RuntimeError:  # a view that no longer fits its tensor's strides: ops whose result has another rank are to blame
        return sites, frozenset(node.name for node in plan.region.inside if node not in plan.region.outside)
    if wrong := _deviating(plan, now):
        return sites, wrong
    return sites + restore_outputs(graph, old_outputs, now), None


def _confirm(graph: Captured, before: Captured, plan: Plan, costs: Costs, sites: list[Site], context: PassContext) -> PassResult:
    """A plan made of timings must show in the whole graph's time too, or it is taken back."""
    if costs.measured:
        before_s, after_s = time_both(before, graph, context.device)
        if after_s >= before_s:
            _take_back(graph, before)
            costs.forget(plan.calls)
            costs.save()
            return PassResult(
                refused=[_summary(plan, f"planned {sites[0].what}; but measured {before_s * 1e3:.3f} -> {after_s * 1e3:.3f} ms")]
            )
        sites[0] = replace(sites[0], what=f"{sites[0].what}, measured {before_s * 1e3:.3f} -> {after_s * 1e3:.3f} ms")
    drop_unused_constants(graph, constant_names(before))
    return PassResult(changed=sites)


def _take_back(graph: Captured, before: Captured) -> None:
    """The graph as it was."""
    fresh = constant_names(graph) - constant_names(before)
    graph.module.graph = before.module.graph
    graph.module.recompile()
    drop_unused_constants(graph, fresh)


def _deviating(plan: Plan, now: dict[fx.Node, Any]) -> frozenset[str]:
    """Ops whose result does not lie as planned."""
    wrong = set()
    for node, variable in plan.given.items():
        found = main_tensor(now.get(node))
        if found is not None and label_of(found.shape, found.strides, plan.region.outside[node]) not in (
            EITHER,
            plan.choice.labels[variable],
        ):
            wrong.add(node.name)
    return frozenset(wrong)


def _summary(plan: Plan, what: str) -> Site:
    """One site for all ops that change their layout (all that have a choice, where none does)."""
    labels = plan.choice.labels
    moved = [node for node, variable in plan.taken.items() if labels[variable] != plan.before[variable]]
    position = {node: number for number, node in enumerate(plan.region.kinds)}
    return site(sorted(moved or plan.taken, key=position.__getitem__), what)


def _figures(plan: Plan, sites: list[Site]) -> str:
    """Conversions and gain in words."""
    copies = sum(one.what.startswith("copy to") for one in sites)
    ops = [variable for node, variable in plan.taken.items() if plan.region.kinds[node] is Kind.COMPUTE]
    last = sum(plan.choice.labels[variable] == LAST for variable in ops)
    return (
        f"{last} of {len(ops)} ops channels-last, {copies} conversions ({len(sites) - copies} by hand removed), "
        f"predicted {plan.before_s * 1e3:.3f} -> {plan.after_s * 1e3:.3f} ms{'' if plan.choice.exact else ' (not proven best)'}"
    )
