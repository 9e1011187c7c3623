"""Does a table still hold? Whole networks timed (or estimated) now, beside what the table predicts for them.

LatencyTable ──load_space──> random networks ──time in rounds, here──> Errors

The networks are drawn from another seed than the build's, so that none was fitted. The line through FLOPs is fitted to these very
networks, which favours FLOPs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import MeasureError
from ...measure.environment import machine_name
from ...target.load import load_target
from ..spaces.space import load_space
from .build import Report, distinct_points
from .clock import Conditions, net_turn, time_in_rounds, under
from .estimated import estimated_errors, estimator
from .fit import errors_of, fit_nonnegative
from .table import Errors, LatencyTable

if TYPE_CHECKING:
    from ..spaces.space import Space

CHECK_SEED, ROUNDS = 90210, 12


def check_table(
    table: LatencyTable, *, nets: int = 12, seed: int = CHECK_SEED, space: Space | None = None, report: Report | None = None
) -> Errors:
    """What the table misses on `nets` networks, on the machine it was made on."""
    say = report or (lambda message: None)
    found: Space = load_space(table.space, **table.settings) if space is None else space
    if table.method == "estimated":
        return estimated_errors(table, found, estimator(load_target(table.target), table.batch), nets, seed, say)
    conditions = Conditions(table.target, table.batch, table.dtype, table.mode, table.threads or 1)
    here = machine_name(conditions.device)
    if here != table.machine:
        raise MeasureError(f"a table of {table.machine}", why=f"this machine is {here}", do="check it there, or build a table here")
    points = distinct_points(found, nets, seed)
    say(f"timing {nets} networks")
    with under(conditions):
        turns = {str(place): net_turn(found.build(point, seed=0), found.input_shape, conditions) for place, point in enumerate(points)}
        times = time_in_rounds(turns, ROUNDS, seed)
    seconds = np.array([times[str(place)][0] for place in range(nets)])
    lines = np.array([[1.0, float(table.flops(found, point))] for point in points])
    predicted = np.array([table.predict(found, point) for point in points])
    return errors_of(predicted, lines @ fit_nonnegative(lines, seconds), seconds, points)
