"""A network small enough to study in a moment: fixed features, a last layer solved for, pictures made on the spot.

small_data() ──> 4 classes of 6x6 pictures, noisy        small_network(data) ──> conv, relu, linear, 100 % right when digital
"""

from __future__ import annotations

import torch
from torch import nn

from ridgeline.workload.data import Data, Split

CLASSES = 4


def small_data(train: int = 96, test: int = 64) -> Data:
    generator = torch.Generator().manual_seed(0)
    shapes = torch.rand(CLASSES, 1, 6, 6, generator=generator).round()

    def part(count: int) -> Split:
        targets = torch.arange(count) % CLASSES
        return Split(shapes[targets] + 0.15 * torch.randn(count, 1, 6, 6, generator=generator), targets)

    return Data("shapes", "image", CLASSES, part(train), part(test))


def small_network(data: Data) -> nn.Module:
    torch.manual_seed(1)
    first, last = nn.Conv2d(1, 6, 3, padding=1), nn.Linear(6 * 9, CLASSES)
    network = nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), last).eval()
    with torch.no_grad():
        features = network[:4](data.train.inputs)
        wanted = nn.functional.one_hot(data.train.targets, CLASSES).float()
        last.weight.copy_(torch.linalg.lstsq(features.double(), wanted.double(), driver="gelsd").solution.T)
        last.bias.zero_()
    return network
