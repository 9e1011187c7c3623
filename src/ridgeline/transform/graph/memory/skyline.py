"""An order to place intervals in, found by filling the arena from the bottom up.

    the skyline: height of what is placed, over time, in flat segments
      lowest segment ──> the longest (or largest) interval that fits between its walls goes there; none fits: fill it up
                         to its lower neighbour
    ──> the order in which the intervals were placed

Ref: Burke et al. 2004 (best fit for strip packing), Sekiyama et al. 2018 (for memory of neural networks).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from .lifetimes import Interval

Segment = tuple[int, int, int]  # first step, last step, height [B]


def skyline_order(intervals: Sequence[Interval], sizes: Sequence[int], better: Callable[[int], Any]) -> list[int]:
    """Numbers of the intervals in the order they were placed; of those that fit, the one with the largest `better` goes first."""
    waiting = sorted(range(len(intervals)), key=lambda i: intervals[i].first)
    segments: list[Segment] = [(0, max((span.last for span in intervals), default=0), 0)]
    order: list[int] = []
    while waiting:
        lowest = min(range(len(segments)), key=lambda place: (segments[place][2], place))
        start, end, height = segments[lowest]
        low = bisect_left(waiting, start, key=lambda i: intervals[i].first)
        high = bisect_right(waiting, end, key=lambda i: intervals[i].first)
        fitting = [i for i in waiting[low:high] if intervals[i].last <= end]
        if fitting:
            chosen = max(fitting, key=better)
            span = intervals[chosen]
            order.append(chosen)
            waiting.remove(chosen)
            cut = [(start, span.first - 1, height), (span.first, span.last, height + sizes[chosen]), (span.last + 1, end, height)]
            segments[lowest : lowest + 1] = [piece for piece in cut if piece[0] <= piece[1]]
        else:
            walls = [segments[place][2] for place in (lowest - 1, lowest + 1) if 0 <= place < len(segments)]
            segments[lowest] = (start, end, min(walls))
        segments = _joined(segments)
    return order


def _joined(segments: list[Segment]) -> list[Segment]:
    """Neighbours of the same height as one."""
    joined = segments[:1]
    for segment in segments[1:]:
        if segment[2] == joined[-1][2]:
            joined[-1] = (joined[-1][0], segment[1], segment[2])
        else:
            joined.append(segment)
    return joined
