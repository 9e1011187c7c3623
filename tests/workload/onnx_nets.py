"""Nets and hand-written graphs the ONNX tests share.

nn.Module ──export──> n.onnx        [NodeProto] + shapes ──save──> n.onnx
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional

FLOAT, INT64, INT8, UINT8, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL
Value = tuple[int, list[Any]]


class ConvNet(nn.Module):
    """Strided, grouped, depthwise, dilated and transposed convolutions, a pool and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU())
        self.grouped = nn.Conv2d(16, 32, 3, padding=1, groups=4, bias=False)
        self.depthwise = nn.Conv2d(32, 32, 5, padding=4, dilation=2, groups=32)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.depthwise(functional.relu(self.grouped(self.stem(x)))))
        return self.head(functional.max_pool2d(x, 2).mean((2, 3)))


class Block(nn.Module):
    """One encoder layer with attention written out, as the exporter would write it."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.relu(self.up(self.norm2(x))))


class Recurrent(nn.Module):
    def __init__(self, kind: str, layers: int, both_ways: bool) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(8, 16, layers, bidirectional=both_ways)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class ResponseNorm(nn.Module):
    """Exported as a chain of shape arithmetic, a pad, a pool and an If that squeezes or does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.local_response_norm(x, 5)


def export(module: nn.Module, inputs: torch.Tensor, path: Path, **options: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (inputs,), str(path), dynamo=False, opset_version=20, input_names=["x"], **options)
    return str(path)


def save(
    path: Path, nodes: list[Any], inputs: dict[str, Value], outputs: list[str], weights: dict[str, Value] | None = None, **model: Any
) -> str:
    """A file of hand-written nodes; weights hold zeros, in as many elements as their dimensions say."""
    stored = [helper.make_tensor(name, kind, dims, bytes(_size(kind, dims)), raw=True) for name, (kind, dims) in (weights or {}).items()]
    taken = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()]
    graph = helper.make_graph(
        nodes, "g", taken, [helper.make_empty_tensor_value_info(name) for name in outputs], [*stored, *model.pop("constants", [])]
    )
    graph.value_info.extend(model.pop("claims", []))
    opsets = [helper.make_opsetid("", model.pop("opset", 23)), *model.pop("opsets", [])]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10, **model).SerializeToString())
    return str(path)


def _size(kind: int, dims: list[int]) -> int:
    elements = int(torch.tensor(dims).prod()) if dims else 1
    return -(-elements // 2) if kind == TensorProto.INT4 else elements * {FLOAT: 4, INT64: 8, INT8: 1, UINT8: 1, BOOL: 1}[kind]


def int64s(name: str, values: list[int]) -> Any:
    return helper.make_tensor(name, INT64, [len(values)], values)
