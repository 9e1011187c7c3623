"""Models given to use_kernels: what is fused in them, their copies and parts, gradient checkpointing."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ridgeline.kernel import replace
from ridgeline.kernel.fuse import Rotary
from ridgeline.kernel.replace import Replaced
from ridgeline.kernel.softmax import columns_kind
from ridgeline.kernel.use import Trial, use_kernels


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class Added(Gated):
    """Has the parts of a gated perceptron, but adds where one multiplies."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) + self.up_proj(hidden))


class HandRMSNorm(nn.Module):
    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.shift = nn.Parameter(torch.rand(8) + 0.5), 1e-6, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.weight + self.shift)


class Net(nn.Module):
    """Everything that is fused, but for rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = HandRMSNorm(), Gated()
        self.tail = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(self.tail(x + self.mlp(self.norm(x))), -1)


FUSED = {"swiglu", "rms_norm", "batch_norm", "softmax"}


def test_fusing_asks_the_module_first(device: str) -> None:
    x = torch.randn(4, 8, device=device)
    for module in (Added(), HandRMSNorm(shift=0.01), HandRMSNorm(shift=1e-5)):
        module = module.to(device)
        before = module(x)
        kernels = use_kernels(nn.Sequential(module))
        with replace.everywhere():
            assert torch.equal(module(x), before)
        assert not kernels.replaced and "forward" not in vars(module)
    gated = Gated().to(device)
    before = gated(x)
    kernels = use_kernels(nn.Sequential(gated))
    with replace.everywhere():
        torch.testing.assert_close(gated(x), before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gated(hidden=x), before, rtol=1e-4, atol=1e-5)
    assert kernels.replaced == {"swiglu": 1}
    kernels.undo()
    assert "forward" not in vars(gated)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def saved(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


@pytest.mark.parametrize("copying", [copied, saved])
def test_a_copy_computes_with_its_own_weights(device: str, copying: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Net().to(device), torch.randn(6, 8, device=device)
    kernels = use_kernels(model)
    with replace.everywhere():
        before = model(x)
        assert set(kernels.replaced) >= FUSED
        twin = copying(copying(model))
        torch.testing.assert_close(twin(x), before, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            twin.mlp.down_proj.weight.zero_()
            twin.tail[2].weight.zero_()
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(twin(x), functional.softmax(twin.tail[2].bias, -1).expand(6, 4), rtol=1e-4, atol=1e-5)
        used = use_kernels(twin)  # a copy is a model like any other
        twin(x)
        assert set(used.replaced) >= FUSED
        used.undo()
    kernels.undo()
    for module in (*model.modules(), *twin.modules()):
        assert not replace.overridden(module)
    assert "forward" not in vars(model) and "forward" not in vars(twin)


def test_a_copy_needs_nothing_of_ours_to_be_loaded(device: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()).to(device)
    kernels = use_kernels(model)
    assert b"ridgeline" not in pickle.dumps(model)
    kernels.undo()


def test_the_average_of_a_model_is_its_own(device: str) -> None:
    model, x = Net().to(device), torch.randn(6, 8, device=device)
    kernels = use_kernels(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    with replace.everywhere():
        before = model(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.testing.assert_close(average(x), before, rtol=1e-4, atol=1e-5)
    kernels.undo()


def test_parts_exchanged_later_are_used(device: str) -> None:
    model, x = Net().to(device).eval(), torch.randn(6, 8, device=device)
    kernels = use_kernels(model)
    with replace.everywhere():
        for change in (
            lambda: setattr(model.mlp, "gate_proj", nn.Linear(8, 16).to(device)),
            lambda: setattr(model.mlp, "down_proj", nn.Sequential(nn.Linear(16, 8), nn.Tanh()).to(device)),
            lambda: setattr(model.norm, "weight", nn.Parameter(torch.full((8,), 3.0, device=device))),
            lambda: setattr(model.norm, "eps", 0.7),
            lambda: setattr(model.mlp, "act_fn", nn.GELU()),
            lambda: model.tail.append(nn.Tanh()),
        ):
            before = model(x)
            change()
            after = model(x)
            assert not torch.allclose(after, before, rtol=1e-3)
            kernels.undo()
            torch.testing.assert_close(after, model(x), rtol=1e-4, atol=1e-5)
            if isinstance(model.mlp.act_fn, nn.SiLU):
                kernels = use_kernels(model)
    assert "forward" not in vars(model.mlp)


def test_an_activation_exchanged_while_fused_is_used(device: str) -> None:
    model, x = nn.Sequential(Gated()).to(device), torch.randn(4, 8, device=device)
    kernels = use_kernels(model)
    model[0].act_fn = nn.Tanh()
    with replace.everywhere():
        torch.testing.assert_close(model(x), Gated.forward(model[0], x), rtol=1e-4, atol=1e-5)
    assert "swiglu" not in kernels.replaced
    kernels.undo()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = nn.Sequential(HandRMSNorm(), Gated(), nn.LayerNorm(8), nn.Softmax(-1)), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(checkpoint(self.body, x, use_reentrant=self.reentrant), -1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_gradient_checkpointing(device: str, reentrant: bool, backward_inside: bool) -> None:
    model, x = Checkpointed(reentrant).to(device), torch.randn(3, 8, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x) if not reentrant else (None,)
    if expected is None:
        model(x).square().sum().backward()
        expected, x.grad = x.grad, None
    kernels = use_kernels(model)
    with replace.everywhere():
        loss = model(x).square().sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-5)
    assert kernels.replaced["softmax"] == (2 if reentrant else 1)  # outside of the checkpoint as ever
    kernels.undo()


def test_a_checkpointed_model_gets_through_its_trial(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns with kernels and without, and backward after each."""
    wins = {(op, kind, torch.float32): replace.Win(0, None) for op in ("softmax", "swiglu", "rms_norm") for kind in ("", columns_kind(8))}
    model, x = Checkpointed(False).to(device), torch.randn(3, 8, device=device, requires_grad=True)
    kernels = use_kernels(model)
    monkeypatch.setattr(replace, "_wins", wins)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for _ in range(2 * (Trial.UNCOUNTED + Trial.COUNTED) + 2):
        model(x).sum().backward()
    (trial,) = model.forward.trials.values()  # type: ignore[attr-defined]
    assert trial.pays is not None and kernels.replaced["softmax"] >= Trial.COUNTED
    kernels.undo()


class Sub(torch.Tensor):
    """Somebody's own kind of tensor."""


def test_fused_modules_of_other_tensors_are_torchs(device: str) -> None:
    model, x = nn.Sequential(HandRMSNorm(), Gated()).to(device), torch.randn(4, 8, device=device)
    kernels = use_kernels(model)
    with replace.everywhere():
        expected = model(x)
        found = model(x.as_subclass(Sub))
        assert isinstance(found, Sub) and kernels.replaced["rms_norm"] == kernels.replaced["swiglu"] == 1
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=1e-4, atol=1e-5)
        assert model[0](x.to(torch.bfloat16)).dtype == torch.float32  # of weight times bfloat16, as in the module's own
        assert kernels.replaced["rms_norm"] == 1
        model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Sub))
        model(x)
    assert kernels.replaced["rms_norm"] == 1
    kernels.undo()


def test_fused_modules_are_left_to_the_compiler(device: str) -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    recorder = EagerAndRecordGraphs()
    model, x = nn.Sequential(HandRMSNorm(), Gated()).to(device), torch.randn(4, 8, device=device)
    expected = model(x)
    kernels = use_kernels(model[0]), use_kernels(model[1])
    inner = [vars(module).get("forward") for module in model]
    assert all(isinstance(forward, Replaced) for forward in inner)
    with replace.everywhere():
        found = torch.compile(model, fullgraph=True, backend=recorder)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    targets = {str(node.target) for node in recorder.graphs[0].graph.nodes}
    assert not {target for target in targets if "swiglu" in target or "rms_norm" in target}, targets
    for used in kernels:
        assert not used.replaced
        used.undo()


def test_rotary_positions_of_another_kind_are_the_files_own(device: str) -> None:
    """More arguments, or positions of every sequence, are computed as before; the usual call by ours."""
    file = ModuleType("transformers.models.made_up")
    seen: list[Any] = []

    def own(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        seen.append(unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        half = [torch.cat((-x[..., 8:], x[..., :8]), -1) for x in (q, k)]
        return q * cos + half[0] * sin, k * cos + half[1] * sin

    file.apply_rotary_pos_emb = own  # type: ignore[attr-defined]
    q, k = torch.randn(2, 4, 6, 16, device=device), torch.randn(2, 2, 6, 16, device=device)
    angle = torch.rand(2, 6, 8, device=device).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    counted: Counter[str] = Counter()
    undo = Rotary(file, counted).put()
    turn = file.apply_rotary_pos_emb
    with replace.everywhere():
        for args, kwargs in (((q, k, cos, sin), {}), ((q, k, cos[:1], sin[:1], 1), {}), ((q, k, cos[:1], sin[:1]), {"unsqueeze_dim": 1}),
                             ((q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2), {})):  # fmt: skip
            expected = own(*args, **kwargs)
            seen.clear()
            for ours, plain in zip(turn(*args, **kwargs), expected, strict=True):
                assert torch.equal(ours, plain)
            assert len(seen) == 1 and not counted
        assert isinstance(turn(q.as_subclass(Sub), k, cos[:1], sin[:1])[0], Sub) and not counted
        for ours, plain in zip(turn(q, k, cos[:1], sin[:1]), own(q, k, cos[:1], sin[:1]), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert counted == {"rope": 1}
    undo()
    assert file.apply_rotary_pos_emb is own and torch.equal(turn(q, k, cos, sin)[0], own(q, k, cos, sin)[0])
