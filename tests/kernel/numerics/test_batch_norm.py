"""Batch norm in training against float64: layouts, what follows it, gradients, running statistics, stand-ins."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.kernel import batch_norm as module
from ridgeline.kernel import replace, tuning
from ridgeline.kernel.batch_norm import ACTIVATIONS, batch_norm, batch_norm_backward_op, batch_norm_op
from ridgeline.kernel.tuning import forced
from ridgeline.kernel.use import use_kernels
from ridgeline.workload.models.normed import normed
from tests.kernel.support import FLOATS, check

SHAPES = [(37, 24), (3, 20, 5, 7), (2, 70, 3, 3), (2, 3, 11), (10, 2)]
SMALL = {"TILE": 256, "BLOCK": 16, "PER_THREAD": 8, "STAGES": 1, "WARPS": 3}


@pytest.fixture(autouse=True)
def small_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter can afford still has several programs, of several tiles each, the last one not full."""
    if device == "cpu":
        monkeypatch.setattr(module, "_plan", partial(planned_with, module._plan, SMALL))
        monkeypatch.setattr(module, "_plans", {})


def planned_with(plan: Any, config: Any, op: str, *args: Any, **constants: Any) -> Any:
    """A plan made with this configuration, whatever others were made with before."""
    if op in tuning._forced:
        return plan(op, *args, **constants)
    with forced(op, config):
        return plan(op, *args, **constants)


def test_tiles(device: str) -> None:
    x = torch.zeros(3, 20, 5, 7, device=device)
    for plan in (module._plan_forward(x, "none"), module._plan_backward(x, "none", True)):
        last = plan.then.then
        assert last.then is None and plan.grid == last.grid and plan.constants["ROWS"] == last.constants["ROWS"]
        assert device != "cpu" or (plan.grid == (2, 3) and plan.constants["ROWS"] == 16)  # 7 tiles of 105 rows


def plain(x: Any, w: Any, b: Any, r: Any = None, activation: str = "none") -> torch.Tensor:
    """As torch does it: rounded to the dtype after every step."""
    w = torch.ones_like(b) if w is None and b is not None else w  # torch's own gradient of a bias alone fails on CUDA
    out = F.batch_norm(x, None, None, w, b, True)
    out = out if r is None else out + r
    return out if activation == "none" else getattr(F, activation)(out)


def ours(x: Any, w: Any, b: Any, r: Any = None, activation: str = "none") -> torch.Tensor:
    return batch_norm(x, None, None, w, b, residual=r, activation=activation)


def gradients(function: Any, g: torch.Tensor, tensors: Any, activation: str) -> list[torch.Tensor]:
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    function(*leaves, activation).backward(g)
    return [leaf.grad for leaf in leaves if leaf is not None]


def made(shape: tuple[int, ...], dtype: torch.dtype, device: str, residual: bool) -> list[torch.Tensor | None]:
    """x, weight, bias, residual; nothing near a kink of an activation, where a rounding decides."""
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 2 + 0.5).to(dtype)
    w, b = torch.rand(shape[1], device=device) + 0.5, torch.randn(shape[1], device=device)
    r = torch.randn(shape, device=device).to(dtype) if residual else None
    for activation in ("relu", "hardswish"):
        z = plain(x.double(), w.to(dtype).double(), b.to(dtype).double(), None if r is None else r.double())
        for kink in (0.0,) if activation == "relu" else (-3.0, 3.0):
            near = (z - kink).abs() < 0.03
            x = torch.where(near, x + 0.25, x)
    return [x, w.to(dtype), b.to(dtype), r]


def double(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(device: str, dtype: torch.dtype, shape: tuple[int, ...], activation: str, residual: bool) -> None:
    tensors = made(shape, dtype, device, residual)
    g = torch.randn(shape, device=device).to(dtype)
    out = ours(*tensors, activation)
    check(out, plain(*tensors, activation), plain(*double(tensors), activation))
    assert module._dense(out) is out or out.dim() == 3
    exact = gradients(plain, g.double(), double(tensors), activation)
    for mine, theirs, right in zip(gradients(ours, g, tensors, activation), gradients(plain, g, tensors, activation), exact, strict=True):
        check(mine, theirs, right)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts(device: str, dtype: torch.dtype) -> None:
    """Channels first, transposed, sliced, broadcast: all as the same numbers with the channels innermost."""
    x, w, b, _ = made((4, 10, 6, 5), dtype, device, False)
    assert x is not None
    some = (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3), x[:, ::2], x[1:, :, 1:], x[:1].expand(3, -1, -1, -1))
    for one in some:
        channels = one.shape[1]
        out = ours(one, w[:channels], b[:channels])
        check(out, plain(one, w[:channels], b[:channels]), plain(one.double(), w[:channels].double(), b[:channels].double()))


@pytest.mark.parametrize("affine", [(True, False), (False, True), (False, False)])
def test_without_weight_or_bias(device: str, affine: tuple[bool, bool]) -> None:
    x, w, b, _ = made((3, 20, 5, 7), torch.float32, device, False)
    g = torch.randn_like(x)
    tensors = [x, w if affine[0] else None, b if affine[1] else None, None]
    exact = gradients(plain, g.double(), double(tensors), "relu")
    for mine, theirs, right in zip(gradients(ours, g, tensors, "relu"), gradients(plain, g, tensors, "relu"), exact, strict=True):
        check(mine, theirs, right)


def test_float32_parameters_of_half_values(device: str) -> None:
    """As under autocast."""
    x, w, b, r = made((3, 20, 5, 7), torch.float16, device, True)
    w, b, g = w.float(), b.float(), torch.randn_like(x)
    tensors = [x, w, b, r]
    exact = gradients(plain, g.double(), double(tensors), "relu")

    def once(x: torch.Tensor, w: Any, b: Any, r: torch.Tensor, activation: str) -> torch.Tensor:
        return plain(x.float(), w, b, r.float(), activation).half()

    mine, theirs = (gradients(one, g, tensors, "relu") for one in (ours, once))
    assert [one.dtype for one in mine] == [torch.float16, torch.float32, torch.float32, torch.float16]
    for one, two, right in zip(mine, theirs, exact, strict=True):
        check(one, two, right)


@pytest.mark.parametrize("tiles", ["small", "usual"])
def test_mean_far_from_zero(device: str, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares about a mean of the channel's own: no cancellation, also where one value is far from all others, wherever it stands."""
    if tiles == "usual":
        monkeypatch.setattr(module, "_plan", partial(planned_with, module._plan, module.SPACE[4]))
    torch.manual_seed(2)
    far = torch.randn(500, 3, device=device) + 4096
    first, late = torch.randn(500, 3, device=device), torch.randn(500, 3, device=device)
    first[0], late[400] = 1e4, -1e4
    for x in (far, first, late):
        check(ours(x, None, None), plain(x, None, None), plain(x.double(), None, None))


@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_statistics(device: str, momentum: float) -> None:
    x, _, _, _ = made((3, 20, 5, 7), torch.float32, device, False)
    mine, theirs, exact = ([torch.zeros(20, device=device), torch.ones(20, device=device)] for _ in range(3))
    exact = [one.double() for one in exact]
    batch_norm(x, *mine, None, None, momentum)
    F.batch_norm(x, *theirs, training=True, momentum=momentum)
    F.batch_norm(x.double(), *exact, training=True, momentum=momentum)
    for triple in zip(mine, theirs, exact, strict=True):
        check(*triple)
    alone = torch.zeros(20, device=device)
    batch_norm(x, alone, None, None, None, momentum)
    assert torch.equal(alone, mine[0])
    half = [torch.zeros(20, device=device, dtype=torch.float16), torch.ones(20, device=device, dtype=torch.float16)]
    batch_norm(x.half(), *half, None, None, momentum)
    assert half[0].dtype == torch.float16 and torch.allclose(half[1].float(), theirs[1], atol=0.02)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_gradcheck(device: str, activation: str, residual: bool) -> None:
    tensors = [None if t is None else t.double().requires_grad_() for t in made((4, 3, 2, 2), torch.float64, device, residual)]
    assert torch.autograd.gradcheck(lambda *a: ours(*a, activation=activation), tensors[: 4 if residual else 3], fast_mode=True)


def test_float64_after_float32_of_the_same_shape(device: str) -> None:
    """A launch kept for one dtype is not another's."""
    tensors = made((37, 24), torch.float32, device, True)
    g = torch.randn(37, 24, device=device)
    gradients(ours, g, tensors, "relu")
    mine, right = (gradients(one, g.double(), double(tensors), "relu") for one in (ours, plain))
    for one, two in zip(mine, right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_only_what_is_needed(device: str) -> None:
    x, w, b, r = made((3, 20, 5, 7), torch.float32, device, True)
    exact = gradients(plain, x, [x, w, b, r], "relu")
    for place in range(4):
        leaves = [t.clone().requires_grad_(at == place) for at, t in enumerate((x, w, b, r))]
        ours(*leaves, "relu").backward(x)
        assert [leaf.grad is not None for leaf in leaves] == [at == place for at in range(4)]
        assert torch.allclose(leaves[place].grad, exact[place], atol=1e-4)


def test_errors(device: str) -> None:
    x, w, b, r = made((4, 10, 6, 5), torch.float32, device, True)
    for bad in ((x, w[:3], b), (x, w, b, r[:2]), (x, w, b, r.half()), (x, w, b, r, "gelu"), (x[:1, :, :1, :1], w, b), (x.long(), w, b),
                (x[0, :, 0, 0], None, None), (x[:0], w, b)):  # fmt: skip
        with pytest.raises(OptionError):
            ours(*bad)


def test_opcheck(device: str) -> None:
    x, w, b, r = made((3, 4, 2, 3), torch.float32, device, True)
    leaves = [t.clone().requires_grad_() for t in (x, r, w, b)]
    torch.library.opcheck(batch_norm_op.overload, (*leaves, 1e-5, "relu"))
    torch.library.opcheck(batch_norm_op.overload, (leaves[0].bfloat16(), None, None, None, 1e-5, "none"))
    stats = batch_norm_op(x, r, w, b, 1e-5, "relu")[1]
    for residual, needs in ((r, [True, True, True, True]), (None, [False, False, True, False])):
        torch.library.opcheck(batch_norm_backward_op.overload, (x, x, residual, stats, w, b, needs, "relu"))


def test_deterministic(device: str) -> None:
    tensors = made((5, 20, 5, 7), torch.float32, device, True)
    g = torch.randn(5, 20, 5, 7, device=device)
    runs = [gradients(ours, g, tensors, "hardswish") for _ in range(2)]
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


@pytest.mark.parametrize("candidate", range(len(module.SPACE)))
def test_every_configuration(device: str, candidate: int) -> None:
    tensors = made((61, 150), torch.float32, device, True)
    g = torch.randn(61, 150, device=device)
    with forced("batch_norm", module.SPACE[candidate]), forced("batch_norm_backward", module.SPACE[candidate]):
        check(ours(*tensors, "relu"), plain(*tensors, "relu"), plain(*double(tensors), "relu"))
        mine = gradients(ours, g, tensors, "relu")
    exact = gradients(plain, g.double(), double(tensors), "relu")
    for one, two, right in zip(mine, gradients(plain, g, tensors, "relu"), exact, strict=True):
        check(one, two, right)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(self.conv(x), self.norm, self.act, x)


def test_model_in_a_block(device: str) -> None:
    """One operator for norm, sum and ReLU; buffers and gradients as torch's; evaluation, hooks and other layouts are left to torch."""
    torch.manual_seed(3)
    model = Block().to(device, memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 6, device=device).to(memory_format=torch.channels_last)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(x).square().sum().backward()
    right = {name: p.grad.clone() for name, p in model.named_parameters()}
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    model.zero_grad()
    with replace.everywhere(), use_kernels() as kernels:
        model(x).square().sum().backward()
        assert kernels.report()["batch_norm"] == 1
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, right[name], rtol=1e-4, atol=1e-4)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, after[name])
        watched = model.norm.register_forward_hook(lambda *_: None)
        model(x)
        watched.remove()
        model.eval()(x)
        F.batch_norm(x.contiguous(), None, None, training=True)
        assert kernels.report()["batch_norm"] == 1
        F.batch_norm(x, None, None, training=True)
        assert kernels.report()["batch_norm"] == 2


def test_fused_sequences(device: str) -> None:
    """Batch norms with an activation behind them, in the model's own order of calls; undo puts the forward back."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2), nn.BatchNorm1d(2), nn.Hardswish()
    )
    model.to(device)
    x = torch.randn(9, 6, device=device)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    right = model(x)
    model.load_state_dict(state)
    kernels = use_kernels(model)
    with replace.everywhere():
        out = model(x)
    assert kernels.report()["batch_norm"] == 3
    torch.testing.assert_close(out, right)
    kernels.undo()
    assert "forward" not in vars(model)


def test_cumulative_average(device: str) -> None:
    norms = [nn.BatchNorm1d(3, momentum=None).to(device) for _ in range(2)]
    act = nn.ReLU()
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(8, 3, device=device)
        normed(x, norms[0], act)
        with replace.everywhere(), use_kernels() as kernels:
            normed(x, norms[1], act)
        assert kernels.report()["batch_norm"] == 1
    for one, two in zip(norms[0].state_dict().values(), norms[1].state_dict().values(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.empty(2**31 // 256 + 8, 256, device="cuda", dtype=torch.bfloat16).normal_()
    out = batch_norm(x)
    mean, deviation = x[-4:].double(), x.float().std(0).double()
    assert torch.allclose(out[-4:].double(), (mean - x.float().mean(0).double()) / deviation, atol=0.03)
