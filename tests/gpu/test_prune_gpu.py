"""Pruning on a real CUDA device: 2:4 through torch's sparse kernels, masks and selection on the device, channels removed there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.transform.prune.masks import Masks
from ridgeline.transform.prune.scores import lowest, score, weights_of
from ridgeline.transform.prune.sparse24 import NMLinear, nm_mask
from ridgeline.transform.prune.step import prune
from ridgeline.workload.models.cifar_resnet import CifarResNet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 256])
def test_sparse_kernel(dtype: torch.dtype, rows: int) -> None:
    """The kernel's error against float64 is at most twice that of the dense product in the same type; it sees a planted error."""
    torch.manual_seed(0)
    layer = nn.Linear(512, 256).to("cuda", dtype)
    Masks(layer, {"weight": nm_mask(layer.weight.detach().abs().float(), 2, 4)})
    packed = NMLinear.pack(layer, 2, 4)
    assert packed.has_kernel and torch.equal(packed.dense(), layer.weight)
    x = torch.randn(rows, 512, device="cuda", dtype=dtype)
    assert layer.bias is not None
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    plain, ours = ((out.double() - exact).abs().max() for out in (layer(x), packed(x)))
    allowed = 2 * plain + 2 * torch.finfo(dtype).eps
    assert ours <= allowed
    wrong = NMLinear.pack(layer, 2, 4)
    wrong.values.data *= 1.05  # before its first call, which lays the weight out for the kernel
    assert (wrong(x).double() - exact).abs().max() > allowed


def test_selection_is_the_same_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 50))
    model[0].weight.data = model[0].weight.data.round(decimals=2)  # ties
    here = lowest(score(weights_of(model)), 0.7)
    there = lowest(score(weights_of(model.cuda())), 0.7)
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)
    masks = Masks(model, here)  # masks from the CPU follow their weights
    assert masks.pruned["0.weight"].is_cuda and not model[0].weight[masks.pruned["0.weight"]].any()


def test_channels_leave_on_the_device() -> None:
    """Half the FLOPs of ResNet-56: fewer parameters, and faster where the GPU is the limit."""
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model = CifarResNet(9).cuda().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = (torch.randn(4096, 3, 32, 32, device="cuda"),)
    pruned, change = prune(model, method="channels", flops=0.5, scope="layer", round_to=8, inputs=inputs)
    assert next(pruned.parameters()).is_cuda and change.after.parameters < 0.55 * change.before.parameters
    assert change.speedup is not None and change.speedup > 1.1
