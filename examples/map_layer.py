"""One convolution on an array of processing elements: the best mapping, as loops, and as C that runs.

python examples/map_layer.py [ARRAY]
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import ridgeline
from ridgeline.estimate.spatial.lowering import compile_layer, lower


def main() -> None:
    array = ridgeline.load_target(sys.argv[1] if len(sys.argv) > 1 else "array-16")
    conv, image = nn.Conv2d(16, 32, 3, padding=1, bias=False), torch.randn(1, 16, 14, 14)
    network = ridgeline.map_layers(ridgeline.capture(conv, image), array, objective="energy")
    mapped = network.layers[0].mapped
    cost = mapped.cost
    print(f"{cost.energy_pj / 1e6:.2f} uJ, {cost.cycles} cycles, {cost.bottleneck} limits; at most {mapped.gap:.1%} could be saved")

    nest = lower(cost.layer, array, cost.plan)
    print(nest.text())
    outputs = torch.from_numpy(compile_layer(nest)(conv.weight.detach(), image))
    print("the loops in C differ from torch by", f"{(outputs - conv(image)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
