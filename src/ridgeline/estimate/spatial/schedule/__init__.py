"""When each instruction of an accelerator runs: dependences, units, a timeline, and two judges of it.

JSON ──instructions──> [Instruction], {resource: units} ──scheduler──> Timeline ──> text, JSON, report.timeline_trace
                                                                          └──optimum──> check_timeline, optimal_cycles
"""

from .instructions import Instruction, dependences, instructions_from_json, instructions_to_json
from .optimum import check_timeline, optimal_cycles
from .scheduler import Bounds, Row, Timeline, bounds_of, schedule, timeline_from_json

__all__ = [
    "Bounds",
    "Instruction",
    "Row",
    "Timeline",
    "bounds_of",
    "check_timeline",
    "dependences",
    "instructions_from_json",
    "instructions_to_json",
    "optimal_cycles",
    "schedule",
    "timeline_from_json",
]
