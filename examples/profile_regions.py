"""Time regions of your own code: nested, with the rates they reach.

python examples/profile_regions.py
"""

from __future__ import annotations

import torch

from ridgeline import profile_op
from ridgeline.measure.regions import region_table


@profile_op("normalise")
def normalise(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) / x.std()


def main() -> None:
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    for _ in range(10):
        with profile_op("step"):
            with profile_op("product", flops=2 * 512**3):
                c = a @ b
            normalise(c)
    print(region_table())


if __name__ == "__main__":
    main()
