"""ONNX out: onnxruntime's answers are the module's; what ONNX cannot hold is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import TransformError
from ridgeline.transform.saved import load_model
from tests.transform import toy

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from ridgeline.transform.onnx_out import export_onnx  # noqa: E402


class Everything(nn.Module):
    """The operators of small networks, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, dilation=1, groups=1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.layer_norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.fc = nn.Linear(8, 5)
        self.norm.running_mean.copy_(torch.randn(8))
        self.norm.running_var.copy_(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self.norm(self.depth(functional.silu(self.conv(x)))))
        side = functional.pad(x[:, :4, ::2, ::2], (1, 0, 0, 1, 2, 2), value=0.5)
        x = functional.max_pool2d(x, 2, 2) + side[:, :, :-1, 1:]
        x = torch.cat([x, functional.avg_pool2d(self.up(x), 2).repeat_interleave(1, 1)], dim=1)[:, :8]
        x = functional.hardswish(functional.leaky_relu(x, 0.1)) * torch.sigmoid(x) / 1.5 - 0.25
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        x = functional.gelu(self.layer_norm(x)) + torch.tanh(self.rms(x)).clamp(-0.5, 0.5)
        return functional.log_softmax(self.fc(x) * 2, dim=-1)


def run(path: Path, x: Tensor) -> Any:
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def test_operators_agree_at_any_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Everything().eval()
    written = export_onnx(model, (torch.randn(1, 3, 16, 16),), tmp_path / "m.onnx")
    assert written.open_batch and written.largest_difference < 1e-5 and written.bytes == written.path.stat().st_size
    x = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(run(written.path, x), model(x), rtol=1e-4, atol=1e-5)
    assert onnx.load(written.path).ir_version <= 13


def test_attention_agrees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu").eval()
    assert export_onnx(model, (torch.randn(2, 5, 16),), tmp_path / "m.onnx").largest_difference < 1e-5


def test_factored_and_narrowed_models(tmp_path: Path) -> None:
    model = load_model("digits-cnn")
    model.fc1 = nn.Sequential(nn.Linear(128, 6, bias=False), nn.Linear(6, 48))
    written = export_onnx(model, (torch.randn(2, 1, 8, 8),), tmp_path / "m.onnx")
    assert written.largest_difference < 1e-5


def test_static_int8_keeps_its_integers(tmp_path: Path) -> None:
    from ridgeline.transform.quantise.static import quantise_static_

    torch.manual_seed(0)
    model, x = toy.net(64), torch.randn(64, 1, 4, 4)
    quantise_static_(model, [(x,)])
    written = export_onnx(model, (x,), tmp_path / "q.onnx")
    assert written.largest_difference < 0.02
    graph = onnx.load(written.path).graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    stored = [array for array in weights.values() if array.dtype == numpy.int8 and array.ndim > 1]
    assert sorted(array.size for array in stored) == sorted([8 * 9, 128 * 64, 64 * 2])
    assert not any(array.dtype == numpy.float32 and array.size >= 64 * 2 for array in weights.values())
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in graph.node}
    assert written.bytes < 0.5 * sum(p.numel() * 4 for p in toy.net(64).parameters())


def test_wrong_answers_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.transform import onnx_ops

    monkeypatch.setitem(onnx_ops.OPERATORS, torch.ops.aten.relu.default, onnx_ops._simple("Identity"))  # a planted error
    with pytest.raises(TransformError, match="answers differ by"):
        export_onnx(toy.net(), (torch.randn(3, 1, 4, 4),), tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_what_onnx_cannot_hold_is_named(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x).real

    with pytest.raises(TransformError, match="fft"):
        export_onnx(nn.Sequential(nn.Linear(4, 4), Odd()), (torch.randn(2, 4),), tmp_path / "m.onnx")
    with pytest.raises(TransformError, match="not float32"):
        export_onnx(nn.Sequential(nn.Linear(4, 4)).bfloat16(), (torch.randn(2, 4).bfloat16(),), tmp_path / "m.onnx")
    from ridgeline.transform.quantise.step import quantize

    packed, _ = quantize(nn.Sequential(nn.Linear(64, 64)), method="weight-only", inputs=(torch.randn(2, 64),), latency=False)
    with pytest.raises(TransformError, match=r"layer 0 .linear-packed. cannot be exported"):
        export_onnx(packed, (torch.randn(2, 64),), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
