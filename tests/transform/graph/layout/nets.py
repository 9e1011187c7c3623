"""Small networks that need care when layouts change, and costs that decide without a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ridgeline.transform.graph.capture import Captured
from ridgeline.transform.graph.layout.cost import Call, EstimatedCosts, Probe
from ridgeline.transform.graph.layout.regions import Region


class FixedCosts:
    """Channels-last costs `last` of plain for convolutions and pools, conversions `convert_s`; result orders as torch gives them."""

    measured: ClassVar[bool] = False

    def __init__(self, last: float = 0.5, convert_s: float = 1e-4) -> None:
        self.last, self.convert_s = last, convert_s
        self.orders = EstimatedCosts(1e9)

    def prepare(self, graph: Captured, region: Region, seen: dict[fx.Node, Any], calls: Mapping[fx.Node, Call]) -> None:
        """Nothing to measure."""

    def probe(self, call: Call) -> Probe:
        seconds = 1e-3 if call.convolution else 1e-4
        return Probe((seconds, seconds * (self.last if not call.pointwise else 1.0)), self.orders.probe(call).results)

    def convert(self, shape: tuple[int, ...], dtype: str) -> tuple[float, float]:
        return self.convert_s, self.convert_s

    def save(self) -> None:
        """Nothing to keep."""

    def forget(self, calls: Iterable[Call]) -> None:
        """Nothing was timed."""


class ByKernel(FixedCosts):
    """3x3 convolutions are ten times faster channels-last, 1x1 ones ten times faster plain."""

    def probe(self, call: Call) -> Probe:
        found = super().probe(call)
        if not call.convolution:
            return found
        return Probe((1e-3, 1e-4) if call.operands[1].shape[-1] == 3 else (1e-4, 1e-3), found.results)


def conv(inputs: int, outputs: int, kernel: int = 3, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **settings)


class Residual(nn.Module):
    """Convolutions, in-place activations, a sum of two branches, depthwise and grouped ones, pools, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = conv(3, 8), nn.BatchNorm2d(8)
        self.depthwise, self.grouped, self.point = conv(8, 8, groups=8), conv(8, 8, groups=2), conv(8, 8, 1)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.norm(self.stem(x)))
        y = F.relu6(self.depthwise(x), inplace=True)
        x = x + self.point(self.grouped(y))
        x = F.max_pool2d(x, 2)
        x = F.avg_pool2d(F.gelu(x), 2)
        return self.head(x.flatten(1))


class Alternating(nn.Module):
    """Layouts changed by hand before every convolution, in three ways."""

    def __init__(self, channels: int = 16, depth: int = 6, kernel: int = 3) -> None:
        super().__init__()
        self.stem = conv(3, channels)
        self.layers = nn.ModuleList(conv(channels, channels, kernel) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, layer in enumerate(self.layers):
            if number % 3 == 0:
                x = x.contiguous(memory_format=torch.channels_last)
            elif number % 3 == 1:
                x = x.to(memory_format=torch.contiguous_format)
            else:
                x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            x = torch.relu(layer(x))
        return x.mean((2, 3))


class Unet(nn.Module):
    """Transposed convolutions, resizing, cat, chunk, squeeze-and-excite, an image-shaped constant; the output is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.out = conv(4, 8, stride=2), nn.ConvTranspose2d(8, 4, 2, 2), conv(8, 6)
        self.squeeze, self.norm = conv(8, 8, 1), nn.GroupNorm(2, 8)
        self.place = nn.Parameter(torch.randn(1, 8, 4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = F.silu(self.norm(self.down(x))) + self.place
        low = low * torch.sigmoid(self.squeeze(low.mean((2, 3), keepdim=True)))
        first, second = (self.up(low)).chunk(2, 1)
        wide = torch.cat([x, first, second], 1)
        resized = F.interpolate(low, scale_factor=2.0)
        return self.out(wide + resized[:, :8]), F.adaptive_avg_pool2d(wide, 1)


class ConvNextLike(nn.Module):
    """A depthwise convolution, then norm and linears in NHWC by permutes; its tokens leave through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 2, 2), conv(8, 8, groups=8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.wide(y)))
        x = x + y.permute(0, 3, 1, 2)
        return x.reshape(x.shape[0], 8, -1).transpose(1, 2)


class Volume(nn.Module):
    """Three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.ConvTranspose3d(4, 4, 2, 2), nn.BatchNorm3d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return F.avg_pool3d(F.max_pool3d(self.second(x), 2), 2)


class Written(nn.Module):
    """Memory that is written while others still look at it: through a view, and between two reads of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.side = conv(3, 4, 1), conv(4, 4, 1), conv(4, 4), conv(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        part = a[:, :2]
        part.mul_(2.0)
        side = self.side(part)
        b = self.second(a)
        early = self.third(b)
        b.add_(1.0)
        late = self.third(b)
        return early - 0.5 * late + side


class SharedWeights(nn.Module):
    """One convolution used in three places, one of which has a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.shared(x))
        return y * self.shared(y.mean((2, 3), keepdim=True))


NETS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (2, 3, 16, 16)),
    "alternating": (Alternating, (2, 3, 8, 8)),
    "unet": (Unet, (2, 4, 8, 8)),
    "convnext": (ConvNextLike, (2, 3, 8, 8)),
    "volume": (Volume, (2, 2, 4, 4, 4)),
    "written": (Written, (2, 3, 6, 6)),
    "shared": (SharedWeights, (2, 4, 6, 6)),
}


def net(name: str, *, dtype: torch.dtype = torch.float64, channels_last: bool = False) -> tuple[nn.Module, Tensor]:
    """A net with fixed weights in eval mode, and its input."""
    torch.manual_seed(0)
    kind, shape = NETS[name]
    model, x = kind().to(dtype).eval(), torch.randn(shape, dtype=dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    if channels_last:
        memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)  # type: ignore[call-overload]
    return model, x
