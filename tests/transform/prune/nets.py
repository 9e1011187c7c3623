"""Small networks and data made on the spot for the pruning tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.workload.data import Data, Split


class Residual(nn.Module):
    """A stem, two blocks (the second behind a shortcut that pads channels), a concatenation, a depthwise layer and a flattened head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner1, self.inner1_bn = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.outer1 = nn.Conv2d(12, 8, 3, padding=1)
        self.inner2, self.inner2_bn = nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12)
        self.outer2 = nn.Conv2d(12, 16, 3, padding=1)
        self.left, self.right = nn.Conv2d(16, 10, 1), nn.Conv2d(16, 6, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = nn.Linear(16 * 16, 20)
        self.out = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_bn(self.stem(x)).relu()
        x = (x + self.outer1(self.inner1_bn(self.inner1(x)).relu())).relu()
        shortcut = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))
        x = (shortcut + self.outer2(self.inner2_bn(self.inner2(x)).relu())).relu()
        x = self.depthwise(torch.cat((self.left(x).relu(), self.right(x).relu()), 1)).relu()
        return self.out(self.head(x.flatten(1)).relu())


def warm(model: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics and scales of the batch norms away from their defaults, so that forgetting one shows."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()


def blobs(rows: int = 256, features: int = 16, classes: int = 4, seed: int = 0) -> Data:
    """Points around one centre a class: learnt by a small perceptron in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=generator) * 2
    targets = torch.arange(rows) % classes
    inputs = centres[targets] + torch.randn(rows, features, generator=generator)
    split = Split(inputs, targets)
    return Data("blobs", "image", classes, split, split)


def images(rows: int = 64, seed: int = 0) -> Data:
    """Noise with labels, of the size Residual takes."""
    generator = torch.Generator().manual_seed(seed)
    split = Split(torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(5, (rows,), generator=generator))
    return Data("noise", "image", 5, split, split)


def perceptron(seed: int = 0) -> nn.Sequential:
    """16 → 32 → 32 → 4."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
