"""Which candidate to try next, from a guess of each objective.

(mean, deviation) [m] an objective, chance of being feasible [m], values seen [n, objectives] ──> the row of the candidate

One objective: expected improvement (Jones 1998). Two: the growth of the hypervolume. More, or where nothing is hoped to grow: the weakest
of randomly weighted objectives (Chebyshev; Knowles 2006). With several, the first is guessed with optimism (it takes a training to know)
and the others, costs on a device, as they are expected.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..front import growth, nondominated

Guess = tuple[Any, Any]


def choose(guesses: list[Guess], feasible: Any, seen: Any, random: np.random.Generator) -> int:
    """The best row by the number of objectives there are."""
    if len(guesses) == 1:
        mean, deviation = guesses[0]
        return int(np.argmax(expected_improvement(mean, deviation, float(seen.max())) * feasible))
    hope = hopes(guesses)
    low, high = seen.min(axis=0), seen.max(axis=0)
    size = np.where(high > low, high - low, 1.0)
    if len(guesses) == 2:
        added = growth(nondominated(seen), hope, low - 0.1 * size) * feasible
        if added.max() > 0:
            return int(np.argmax(added))
    weighted = (hope - high) / size * random.dirichlet(np.ones(len(guesses)))  # 0: as good as the best seen
    score = weighted.min(axis=1) + 0.05 * weighted.sum(axis=1)
    return int(np.argmax(np.exp(score - score.max()) * feasible))  # above 0, so that chances multiply


def hopes(guesses: list[Guess]) -> Any:
    """[m, objectives]: the first one deviation above its mean."""
    return np.stack([mean if place else mean + deviation for place, (mean, deviation) in enumerate(guesses)], axis=1)


def hopeful(mean: Any, deviation: Any, feasible: Any) -> Any:
    """[m]: one deviation above the mean, and three below where a limit is sure to be broken."""
    return mean + deviation - 4 * (1 - feasible) * deviation


def expected_improvement(mean: Any, deviation: Any, best: float) -> Any:
    z = (mean - best) / deviation
    return (mean - best) * normal_share(z) + deviation * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)


def normal_share(z: Any) -> Any:
    """The normal distribution function by Abramowitz & Stegun 26.2.17: 7.5e-8, and no SciPy."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    density = np.exp(-0.5 * np.asarray(z) ** 2) / np.sqrt(2 * np.pi)
    tail = density * t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return np.where(z > 0, 1 - tail, tail)
