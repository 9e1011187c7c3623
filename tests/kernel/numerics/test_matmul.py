"""matmul, linear and int8_matmul against float64: kernels, layouts, epilogues, gradients, the stand-ins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ridgeline.core.errors import RidgelineError
from ridgeline.kernel import replace
from ridgeline.kernel.matmul import int8_matmul, linear, matmul
from ridgeline.kernel.matmul_kernels import CANDIDATES, default_config
from ridgeline.kernel.replace import REPLACEMENTS
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts

ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
SMALL = {
    "tma": 1,
    "bm": 32,
    "bn": 64,
    "bk": 16,
    "group": 2,
    "warps": 4,
    "stages": 2,
    "split": 1,
    "halves": 1,
    "flatten": 1,
    "specialize": 0,
}
WAYS = {"tma": SMALL, "halves": {**SMALL, "halves": 2}, "pointer": {**SMALL, "tma": 0}, "split": {**SMALL, "tma": 0, "split": 3}}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kernel_in_every_operand_layout(device: str, dtype: torch.dtype, way: str) -> None:
    x, w = random(72, 80, device=device, dtype=dtype), random(80, 136, device=device, dtype=dtype)
    exact, plain = x.double() @ w.double(), x @ w
    with forced("matmul", WAYS[way]):
        for a in (x, x.t().contiguous().t()):
            for b in (w, w.t().contiguous().t()):
                check(matmul(a, b), plain, exact)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(37, 53, 29), (1, 8, 300), (3, 1, 5), (17, 70, 1100)])
def test_unaligned_sizes_with_the_default_choice(device: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    x, w = random(m, k, device=device, dtype=dtype), random(k, n, device=device, dtype=dtype)
    check(matmul(x, w), x @ w, x.double() @ w.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_of_x_w_and_residual(device: str, dtype: torch.dtype) -> None:
    w = random(24, 16, device=device, dtype=dtype)
    for shape in ((20, 24), (2, 5, 24)):
        for name, x in layouts(shape, dtype, device):
            assert matmul(x, w).is_contiguous(), name
            check(matmul(x, w), x @ w, x.double() @ w.double())
    x = random(20, 24, device=device, dtype=dtype)
    for _, b in layouts((24, 16), dtype, device):
        check(matmul(x, b), x @ b, x.double() @ b.double())
    for _, r in layouts((20, 16), dtype, device):
        check(matmul(x, w, residual=r), x @ w + r, x.double() @ w.double() + r.double())
    bias = random(32, device=device, dtype=dtype)[::2]
    check(matmul(x, w, bias), x @ w + bias, x.double() @ w.double() + bias.double())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4), (4,)])
def test_empty_and_one_dimensional(device: str, shape: tuple[int, ...]) -> None:
    x = random(*shape, device=device, dtype=torch.float32)
    w = random(shape[-1], 6, device=device, dtype=torch.float32)
    torch.testing.assert_close(matmul(x, w), x @ w)
    none = random(shape[-1], 0, device=device, dtype=torch.float32)
    assert matmul(x, none).shape == (x @ none).shape


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_epilogue(device: str, dtype: torch.dtype, activation: str | None, way: str) -> None:
    x, weight = random(40, 48, device=device, dtype=dtype), random(72, 48, device=device, dtype=dtype) / 7
    bias, residual = random(72, device=device, dtype=dtype), random(40, 72, device=device, dtype=dtype)
    act = ACTIVATIONS[activation]
    exact = act(F.linear(x.double(), weight.double(), bias.double())) + residual.double()
    with forced("matmul", WAYS[way]):
        check(linear(x, weight, bias, activation, residual), act(F.linear(x, weight, bias)) + residual, exact)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_tails_of_an_activation(device: str, dtype: torch.dtype, activation: str | None) -> None:
    """The product passes x on as it is; far out, the results are small and their errors would hide among large ones."""
    x = torch.cat([torch.linspace(-5, 5, 401), torch.tensor([-30.0, -9.0, 9.0, 60.0])]).to(device, dtype)
    act = ACTIVATIONS[activation]
    one = torch.zeros(16, 16, device=device, dtype=dtype)
    one[0] = 1
    rows = torch.zeros(len(x), 16, device=device, dtype=dtype)
    rows[:, 0] = x
    with forced("matmul", SMALL):
        ours = matmul(rows, one, None, activation)[:, 3]
        broken = matmul(torch.full((16, 16), float("nan"), device=device, dtype=dtype), one, None, activation)
    for part in (x < -3, (x >= -3) & (x < 0), x >= 0):
        check(ours[part], act(x[part]), act(x[part].double()))
    assert broken.isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients(device: str, dtype: torch.dtype, activation: str | None) -> None:
    values = [random(3, 8, 40, device=device, dtype=dtype), random(24, 40, device=device, dtype=dtype) / 6]
    values += [random(24, device=device, dtype=dtype), random(3, 8, 24, device=device, dtype=dtype)]
    dy = random(3, 8, 24, device=device, dtype=dtype)
    act = ACTIVATIONS[activation]

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return act(F.linear(x, weight, bias)) + residual

    def gradients(function: object, wide: bool) -> tuple[torch.Tensor, ...]:
        leaves = [(v.double() if wide else v).detach().clone().requires_grad_() for v in values]
        return torch.autograd.grad(function(*leaves), leaves, dy.double() if wide else dy)

    ours = gradients(lambda x, weight, bias, residual: linear(x, weight, bias, activation, residual), False)
    for mine, theirs, exact in zip(ours, gradients(plain, False), gradients(plain, True), strict=True):
        check(mine, theirs, exact)
        assert mine.stride() == theirs.stride()  # a weight's gradient in another layout would be copied


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(device: str, activation: str | None) -> None:
    inputs = [torch.randn(s, device=device, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4, 5), (5,), (1, 5))]
    assert torch.autograd.gradcheck(lambda x, w, b, r: matmul(x, w, b, activation, r), inputs)
    if activation is None:
        assert torch.autograd.gradgradcheck(lambda x, w: matmul(x, w), inputs[:2])


def test_gradient_without_the_kept_pre_activation(device: str) -> None:
    """Called directly, the operator computes it again."""
    x, w, b = (torch.randn(s, device=device, requires_grad=True) for s in ((8, 16), (16, 12), (12,)))
    ours = torch.autograd.grad(torch.ops.ridgeline.matmul(x, w, b, None, "gelu").sum(), (x, w, b))
    for mine, theirs in zip(ours, torch.autograd.grad(F.gelu(x @ w + b).sum(), (x, w, b)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_only_asked_gradients(device: str) -> None:
    x, w = torch.randn(8, 16, device=device), torch.randn(16, 12, device=device, requires_grad=True)
    matmul(x, w, None, "silu").sum().backward()
    assert w.grad is not None and x.grad is None


def test_second_derivative_of_an_activation(device: str) -> None:
    """The pre-activation that was kept knows nothing of x, and is made again."""
    x, w = (torch.randn(s, device=device, requires_grad=True) for s in ((4, 4), (4, 4)))
    found = []
    for out in (matmul(x, w, None, "gelu"), F.gelu(x @ w)):
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum() + out.sum(), w)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sizes", [(33, 40, 70), (64, 64, 64), (1, 5, 1000)])
def test_int8(device: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = (torch.randint(-128, 128, s, device=device, dtype=torch.int8) for s in ((m, k), (n, k)))
    exact = a.double() @ b.t().double()
    for other in (b.t(), b.t().contiguous()):
        check(int8_matmul(a, other), exact.to(torch.int32), exact)
    with forced("matmul", {**SMALL, "bk": 32}):
        check(int8_matmul(a, b.t()), exact.to(torch.int32), exact)
    torch.library.opcheck(torch.ops.ridgeline.int8_matmul, (a, b.t()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_registered_right(device: str, dtype: torch.dtype) -> None:
    x, w, bias = (random(*s, device=device, dtype=dtype).requires_grad_() for s in ((8, 16), (16, 24), (24,)))
    residual = random(8, 24, device=device, dtype=dtype)
    torch.library.opcheck(torch.ops.ridgeline.matmul, (x, w, bias, residual, "none"))
    torch.library.opcheck(torch.ops.ridgeline.matmul_kept, (x, w, bias, None, "gelu"))


def test_bitwise_the_same_twice(device: str) -> None:
    x, w = torch.randn(16, 1100, device=device), torch.randn(1100, 24, device=device)
    for way in WAYS.values():
        with forced("matmul", way):
            assert torch.equal(matmul(x, w, None, "gelu"), matmul(x, w, None, "gelu"))


def test_stand_ins(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_everywhere", True)
    x, w, b = torch.randn(4, 16, device=device), torch.randn(16, 8, device=device), torch.randn(8, device=device)
    table = {function: stand_in for function, (op, stand_in) in REPLACEMENTS.items() if op == "matmul"}
    for function in (torch.matmul, torch.Tensor.matmul, torch.mm, torch.Tensor.mm):
        torch.testing.assert_close(table[function](x, w), function(x, w))
    torch.testing.assert_close(table[torch.matmul](x.view(2, 2, 16), w), torch.matmul(x.view(2, 2, 16), w))
    torch.testing.assert_close(table[F.linear](x, w.t(), b), F.linear(x, w.t(), b))
    torch.testing.assert_close(table[F.linear](x, w.t(), bias=None), F.linear(x, w.t()))
    assert table[torch.matmul](x, b) is NotImplemented
    assert table[torch.matmul](x[0], w) is NotImplemented
    assert table[torch.matmul](x.double(), w.double()) is NotImplemented
    assert table[torch.mm](x, w, out=torch.empty(4, 8, device=device)) is NotImplemented
    assert table[F.linear](x.double(), w.t().double()) is NotImplemented
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert table[torch.matmul](x, w) is NotImplemented


def test_wrong_arguments_say_so(device: str) -> None:
    x, w = torch.randn(4, 16, device=device), torch.randn(16, 8, device=device)
    for call in (
        lambda: matmul(x, w.t()),
        lambda: matmul(x, w.half()),
        lambda: matmul(x, w, torch.randn(4, device=device)),
        lambda: matmul(x, w, activation="swish"),
        lambda: int8_matmul(x, w),
    ):
        with pytest.raises(RidgelineError):
            call()


def test_defaults_fill_the_machine() -> None:
    large = default_config("half", 4096, 4096, 4096, True, 132)
    assert large == CANDIDATES[0]
    assert default_config("half", 16, 4096, 4096, True, 132)["split"] > 1
    assert default_config("tf32", 4096, 4096, 4096, False, 132)["tma"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large sizes need a GPU")
@pytest.mark.parametrize("way", ["default", *range(len(CANDIDATES))])
@pytest.mark.parametrize("sizes", [(2048, 2048, 2048), (1000, 4104, 520), (16, 4096, 4096)])
def test_every_candidate_on_the_gpu(device: str, way: str | int, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    x, w = random(m, k, device=device, dtype=torch.bfloat16), random(n, k, device=device, dtype=torch.bfloat16)
    exact, plain = x.double() @ w.t().double(), x @ w.t()
    for b in (w.t(), w.t().contiguous()):
        if way == "default":
            check(matmul(x, b), plain, exact)
            continue
        with forced("matmul", CANDIDATES[int(way)]):
            check(matmul(x, b), plain, exact)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tf32 is the tensor cores'")
def test_tf32_where_allowed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(512, 1024, device=device), torch.randn(1024, 768, device=device)
    exact = x.double() @ w.double()
    check(matmul(x, w), x @ w, exact)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    for b in (w, w.t().contiguous().t()):
        check(matmul(x, b), x @ b, exact)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter reads descriptors of tensors")
def test_kept_descriptors_hold_no_memory(device: str) -> None:
    x, w = (torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) for _ in range(2))
    with forced("matmul", CANDIDATES[0]):
        first = matmul(x, w)
        assert torch.equal(matmul(x, w), first)
        before = torch.cuda.memory_allocated()
        del x, w, first
        assert torch.cuda.memory_allocated() <= before - 3 * 2048 * 2048 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="17 GB")
def test_past_two_to_the_31_elements(device: str) -> None:
    x = torch.randn(65537, 32776, device=device, dtype=torch.bfloat16)
    w = torch.randn(32776, 16, device=device, dtype=torch.bfloat16)
    check(matmul(x, w)[-64:], (x @ w)[-64:], x[-64:].double() @ w.double())
    with forced("matmul", {**SMALL, "tma": 0, "bm": 64}):
        check(matmul(x, w)[-64:], (x @ w)[-64:], x[-64:].double() @ w.double())


def test_stand_ins_leave_to_torch_what_only_torch_takes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that is broadcast or of another dtype, and operands of no elements."""
    monkeypatch.setattr(replace, "_everywhere", True)
    x, w, b = torch.randn(4, 16, device=device), torch.randn(8, 16, device=device), torch.randn(8, device=device)
    table = {function: stand_in for function, (op, stand_in) in REPLACEMENTS.items() if op == "matmul"}
    for bias in (b[:1], b[:1].squeeze(), b.double(), b[None]):
        assert table[F.linear](x, w, bias) is NotImplemented
    for empty, other in ((x[:0], w), (x[:, :0], w[:, :0])):
        assert table[F.linear](empty, other) is NotImplemented
        assert table[torch.matmul](empty, other.t()) is NotImplemented and table[torch.mm](empty, other.t()) is NotImplemented


def test_gradients_of_nothing(device: str) -> None:
    """K or N of 0, with a bias and with leading dimensions."""
    for k, n in ((0, 4), (4, 0), (0, 0)):
        for leading in ((3,), (2, 3), (0,)):
            x, w, bias = (torch.randn(s, device=device, requires_grad=True) for s in ((*leading, k), (k, n), (n,)))
            matmul(x, w, bias, "gelu").sum().backward()
            assert x.grad is not None and w.grad is not None and bias.grad is not None
            assert x.grad.shape == x.shape and w.grad.shape == w.shape and not w.grad.any()
            torch.testing.assert_close(bias.grad, torch.autograd.grad(F.gelu(torch.matmul(x, w) + bias).sum(), bias)[0])
