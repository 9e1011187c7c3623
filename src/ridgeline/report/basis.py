"""What the figures of a comparison stand on, so that a limit nobody reached is not read as a time somebody measured.

Profile ──with_basis──> the same with a note: every op at its limit, or mapped at its own width
[Profile, …] ──ranked, headline──> fastest first of those that can run, and in words
[Profile, …] ──basis_lines──> what holds for some of them, one sentence a kind, with their names
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..core.profile import Profile
from ..target.spec import ProcessorSpec
from . import format as fmt
from .summary import pass_s

MISFIT = "does not fit"


def at_limits(profile: Profile) -> bool:
    """Whether its figures are limits: of a processor no op was timed on, and of no measured run."""
    return isinstance(profile.spec, ProcessorSpec) and not profile.spec.probes and profile.total.measured is None


def misfits(profile: Profile) -> bool:
    """Whether the run is impossible for want of memory."""
    return any(note.startswith(MISFIT) for note in profile.notes)


def ranked(profiles: Sequence[Profile]) -> list[Profile]:
    """Fastest first; those without a time, then those whose memory does not hold the run, after them."""
    return sorted(profiles, key=lambda profile: (misfits(profile), pass_s(profile) or math.inf))


def fastest_s(profiles: Sequence[Profile]) -> float:
    """The least time of those that can run; 0 where none can."""
    return min((pass_s(profile) for profile in profiles if pass_s(profile) and not misfits(profile)), default=0.0)


def headline(profiles: Sequence[Profile]) -> str:
    """Who is the fastest: a limit wins against what was timed only if it is reached."""
    running = [profile for profile in ranked(profiles) if pass_s(profile) and not misfits(profile)]
    if not running:
        return "No target has a time." if not any(map(misfits, profiles)) else "None of these targets holds the run in its memory."
    first, least_s, most_s = running[0], pass_s(running[0]), pass_s(running[-1])
    condition = " if its ops reach their limits, which nobody measured" if at_limits(first) and not all(map(at_limits, running)) else ""
    limited = f"limited by {fmt.plain(first.total.bottleneck)}"
    said = f"{fmt.plain(first.target)} is the fastest{condition}: {fmt.seconds(least_s)} a pass, {limited}."
    return said + (f" The slowest takes {fmt.speedup(most_s / least_s)} as long." if most_s > least_s else "")


def with_basis(profile: Profile) -> Profile:
    """The profile with what its figures stand on among its notes."""
    if at_limits(profile):
        said = "each op at its limit, plus launches and page faults as its file states them: no op was timed on it"
    elif _own_width(profile):
        said = f"mapped layer by layer with operands of its own width ({profile.dtype}), whatever --dtype and --mode say"
    else:
        return profile
    return replace(profile, notes=(*profile.notes, said))


def basis_lines(profiles: Sequence[Profile]) -> list[str]:
    """The same of several at once."""
    impossible = [profile.target for profile in profiles if misfits(profile)]
    ideal = [profile.target for profile in profiles if at_limits(profile)]
    mapped = [f"{profile.target} {profile.dtype}" for profile in profiles if _own_width(profile)]
    found = {
        "cannot run, because the memory does not hold it": impossible,
        "each op at its limit, plus launches and page faults as their files state them, because no op was timed on them": ideal,
        "mapped layer by layer with operands of their own width, whatever --dtype and --mode say": mapped,
    }
    return [f"{said}: {', '.join(names)}" for said, names in found.items() if names]


def _own_width(profile: Profile) -> bool:
    return profile.spec is not None and not isinstance(profile.spec, ProcessorSpec)
