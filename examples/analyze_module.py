"""Your own module on a machine you do not have: what limits it, and what would help.

python examples/analyze_module.py [TARGET]
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import ridgeline


class Block(nn.Module):
    """A transformer feed-forward block."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else "h200"
    profile = ridgeline.estimate(ridgeline.capture(Block(), torch.randn(256, 1024)), target)
    print(profile.table())
    for advice in ridgeline.advise(profile)[:3]:
        print(f"{advice.change}: {advice.predicted_speedup:.2f}x, then {advice.next_limit}")


if __name__ == "__main__":
    main()
