"""Last layer and loss in one against float64; the yardstick is torch with logits in the same dtype and a float32 loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ridgeline.kernel import linear_cross_entropy as module
from ridgeline.kernel.library import OPERATORS
from ridgeline.kernel.linear_cross_entropy import lift_of, linear_cross_entropy, rows_a_chunk
from tests.kernel.support import FLOATS, check

ROWS, WIDTH = 8, 24
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def inputs(dtype: torch.dtype, device: str, classes: int = 70, *, bias: bool = True) -> tuple[list[torch.Tensor], torch.Tensor]:
    """([hidden, weight, bias], target); small logits, so that their rounding hides no error of 1 %."""
    shapes = [(ROWS, WIDTH), (classes, WIDTH), (classes,)][: 3 if bias else 2]
    tensors = [(torch.randn(shape, device=device) * 0.3).to(dtype) for shape in shapes]
    target = torch.randint(classes, (ROWS,), device=device)
    target[0], target[1], target[2] = 0, classes - 1, -100
    return tensors, target


def plain(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, **options: object) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target, **options).to(hidden.dtype)


def results(function: object, tensors: list[torch.Tensor], target: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """Loss and the gradients of three times the loss."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    hidden, weight, *bias = leaves
    loss = function(hidden, weight, target, bias[0] if bias else None, **options)  # type: ignore[operator]
    return [loss.detach(), *torch.autograd.grad(loss * 3, leaves)]


def against_torch(tensors: list[torch.Tensor], target: torch.Tensor, **options: object) -> None:
    ours, torchs = results(linear_cross_entropy, tensors, target, **options), results(plain, tensors, target, **options)
    exact = results(plain, [t.double() for t in tensors], target, **options)
    for mine, theirs, truth in zip(ours, torchs, exact, strict=True):
        if mine.dtype == torch.float32 and mine.numel() < 5:  # a few numbers: torch's own error may be 0 by luck
            torch.testing.assert_close(mine.double(), truth, rtol=2.0**-21, atol=0)
        else:
            check(mine, theirs, truth)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("smoothing", "bias"), [(0.0, False), (0.1, True)])
def test_loss_and_gradients(device: str, dtype: torch.dtype, reduction: str, smoothing: float, bias: bool) -> None:
    tensors, target = inputs(dtype, device, bias=bias)
    against_torch(tensors, target, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 5])
def test_chunks_change_nothing(device: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 and 2 chunks, of which the last is shorter: added up in float32, and in the weight's dtype."""
    tensors, target = inputs(dtype, device)
    monkeypatch.setattr(module, "BUFFER_BYTES", rows * 70 * dtype.itemsize)
    assert rows_a_chunk(ROWS, 70, dtype.itemsize) == rows
    against_torch(tensors, target)


@pytest.mark.parametrize("classes", [2, 7, 8, 301])
def test_rows_that_start_and_end_anywhere(device: str, classes: int) -> None:
    against_torch(*inputs(torch.float32, device, classes))


def test_layouts(device: str) -> None:
    (hidden, weight, bias), target = inputs(torch.float32, device)
    against_torch([hidden.t().contiguous().t(), weight.t().contiguous().t(), bias], target)
    against_torch([hidden[:, ::2], weight[:, ::2], bias], target)
    against_torch([hidden[:1].expand(ROWS, WIDTH), weight, bias], target.repeat_interleave(2)[::2])


def test_only_the_gradients_asked_for(device: str) -> None:
    (hidden, weight, bias), target = inputs(torch.float32, device)
    for asked in (hidden, weight, bias):
        leaf = asked.detach().clone().requires_grad_()
        ours = linear_cross_entropy(*(leaf if t is asked else t for t in (hidden, weight)), target, leaf if bias is asked else bias)
        torchs = plain(*(leaf if t is asked else t for t in (hidden, weight)), target, leaf if bias is asked else bias)
        torch.testing.assert_close(torch.autograd.grad(ours, leaf), torch.autograd.grad(torchs, leaf))
    arguments = (hidden, weight, target, None, -100, 0.0, True, False)
    out = torch.ops.ridgeline.linear_cross_entropy(*arguments, [False, True, False])
    assert [tuple(t.shape) for t in out] == [(), (0,), (70, WIDTH), (0,)]
    assert not linear_cross_entropy(hidden, weight, target, bias).requires_grad


def test_a_second_backward_raises_instead_of_scaling_twice(device: str) -> None:
    (hidden, weight, _), target = inputs(torch.float32, device)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_add_up_over_steps(device: str) -> None:
    """.grad may be the very tensor the forward pass wrote."""
    (hidden, weight, _), target = inputs(torch.float32, device)
    ours, torchs = (weight.detach().clone().requires_grad_() for _ in range(2))
    for scale in (1.0, 0.25):
        (linear_cross_entropy(hidden, ours, target) * scale).backward()
        (plain(hidden, torchs, target, None) * scale).backward()
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_a_loss_scaler_is_not_too_late_for_float16(device: str) -> None:
    """Gradients of a mean over many classes are below what float16 holds, until the scaler multiplies them."""
    (hidden, weight, _), target = inputs(torch.float16, device)
    assert lift_of(torch.float16, 100, True) == 128.0 and lift_of(torch.bfloat16, 100, True) == lift_of(torch.float16, 100, False) == 1.0
    hidden, weight = (1e-3 * hidden).requires_grad_(), weight.requires_grad_()
    (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target).float() * 4096, weight)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    (exact,) = torch.autograd.grad(plain(wide[0], wide[1], target, None) * 4096, wide[1])
    assert float((ours.double() - exact).norm() / exact.norm()) < 2e-3


def test_ignored_rows(device: str) -> None:
    tensors, target = inputs(torch.float32, device)
    against_torch(tensors, target.clamp(min=0), ignore_index=0)
    loss, *gradients = results(linear_cross_entropy, tensors, torch.full_like(target, -100))
    assert loss.isnan() and not any(g.any() for g in gradients)


def test_a_target_out_of_range_is_nan(device: str) -> None:
    (hidden, weight, _), target = inputs(torch.float32, device)
    target[4] = 70
    loss, grad_hidden, _ = results(linear_cross_entropy, [hidden, weight], target)
    assert loss.isnan() and grad_hidden.isnan().any(1).tolist() == [row == 4 for row in range(ROWS)]


def test_no_rows(device: str) -> None:
    (hidden, weight, bias), target = inputs(torch.float32, device)
    ours = results(linear_cross_entropy, [hidden[:0], weight, bias], target[:0], reduction="sum")
    torchs = results(plain, [hidden[:0], weight, bias], target[:0], reduction="sum")
    torch.testing.assert_close(ours, torchs)


def test_float64(device: str) -> None:
    """To the last digits; gradcheck would go backward twice."""
    tensors = [torch.randn(shape, dtype=torch.float64, device=device) for shape in ((3, 4), (5, 4), (5,))]
    target = torch.tensor([0, -100, 4], device=device)
    ours, exact = results(linear_cross_entropy, tensors, target, label_smoothing=0.1), results(plain, tensors, target, label_smoothing=0.1)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_same_bits_every_time(device: str) -> None:
    tensors, target = inputs(torch.bfloat16, device)
    assert all(map(torch.equal, results(linear_cross_entropy, tensors, target), results(linear_cross_entropy, tensors, target)))


def test_autocast(device: str) -> None:
    (hidden, weight, bias), target = inputs(torch.float32, device)
    leaf = weight.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = linear_cross_entropy(hidden, leaf, target, bias)
    halves = [t.detach().bfloat16().float() for t in (hidden, leaf, bias)]
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(*halves), target), rtol=2e-3, atol=0)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.dtype == gradient.dtype == torch.float32


def test_kernels_and_reference_agree(device: str) -> None:
    (hidden, weight, bias), target = inputs(torch.float32, device)
    for mean in (True, False):
        arguments = (hidden, weight, target, bias, -100, 0.1, mean, True, [True, True, True])
        ours, reference = torch.ops.ridgeline.linear_cross_entropy(*arguments), OPERATORS["linear_cross_entropy"].reference(*arguments)
        torch.testing.assert_close(tuple(ours), tuple(reference))


def test_scaling_in_place(device: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = torch.randn(5000, device=device, dtype=dtype)
        for by in (1.0, 0.5):
            scaled = x.clone()
            torch.ops.ridgeline.scale_in_place(scaled, torch.tensor(by, device=device))
            assert torch.equal(scaled, x * by)


def test_opcheck(device: str) -> None:
    (hidden, weight, bias), target = inputs(torch.float32, device, 9)
    wanted = [True, True, True]
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    arguments = (*leaves, target, bias, -100, 0.1, True, False, wanted)
    torch.library.opcheck(torch.ops.ridgeline.linear_cross_entropy.default, arguments)
    torch.library.opcheck(torch.ops.ridgeline.scale_in_place.default, (torch.randn(8, device=device), torch.tensor(2.0, device=device)))


def test_traced_by_dynamo(device: str) -> None:
    tensors, target = inputs(torch.float32, device)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(compiled, tensors, target), results(plain, tensors, target))


def test_chunks_are_even_and_fit_the_buffer() -> None:
    assert rows_a_chunk(8192, 128256, 2) == 2048
    assert rows_a_chunk(8192, 32000, 2) == 8192
    assert rows_a_chunk(8000, 128256, 2) == 2048
    for rows, classes in ((10000, 128256), (5000, 50257), (3, 1 << 30), (100000, 262144)):
        assert rows_a_chunk(rows, classes, 2) * classes * 2 <= max(module.BUFFER_BYTES, classes * 2)


def test_wrong_arguments_are_named(device: str) -> None:
    (hidden, weight, _), target = inputs(torch.float32, device)
    with pytest.raises(ValueError, match="expected"):
        linear_cross_entropy(hidden, weight.t(), target)
    with pytest.raises(ValueError, match="mean or sum"):
        linear_cross_entropy(hidden, weight, target, reduction="none")
    with pytest.raises(ValueError, match="one dtype"):
        linear_cross_entropy(hidden, weight.bfloat16(), target)


@ON_GPU
@pytest.mark.parametrize("rows", [1000, 4096, 40000])
def test_real_vocabulary_and_memory(rows: int) -> None:
    """40000 rows are more than 4 chunks: grad_weight in float32. A sum: `check` cannot see 1 % of a mean's small gradients."""
    hidden = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(50257, 512, device="cuda", dtype=torch.bfloat16) * 0.02
    target = torch.randint(50257, (rows,), device="cuda")
    peaks = []
    outcomes = []
    for function in (linear_cross_entropy, plain, lambda h, w, t, _, **options: F.cross_entropy(F.linear(h, w), t, **options)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outcomes.append(results(function, [hidden, weight], target, reduction="sum"))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # float64 logits of all rows would not fit: a row of hidden has its gradient to itself, and those of weight are checked at 1000 rows
    few = slice(0, 1000)
    exact = results(plain, [hidden[few].double(), weight.double()], target[few], reduction="sum")
    check(outcomes[0][1][few], outcomes[1][1][few], exact[1])
    if rows == 1000:
        check(outcomes[0][0], outcomes[1][0], exact[0])
        check(outcomes[0][2], outcomes[1][2], exact[2])
    if rows == 40000:
        assert peaks[0] * 3 < peaks[2]  # bfloat16 throughout, as most would write it


def test_many_chunks_add_up_in_float32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 chunks all alike: 32 times the gradient of one, which a bfloat16 holds as well, but not the sums on the way."""
    hidden, weight = torch.ones(32, 8, device=device).bfloat16(), torch.zeros(3, 8, device=device).bfloat16()
    target = torch.zeros(32, dtype=torch.int64, device=device)
    monkeypatch.setattr(module, "BUFFER_BYTES", weight.shape[0] * 2)
    assert rows_a_chunk(32, 3, 2) == 1
    one, all_ = (
        torch.ops.ridgeline.linear_cross_entropy(hidden[:n], weight, target[:n], None, -100, 0.0, False, False, [False, True, False])[2]
        for n in (1, 32)
    )
    assert torch.equal(all_, 32 * one) and bool((one != 0).all())


def test_narrow_targets(device: str) -> None:
    """Compared in its own dtype, -100 would be the class 156 of a uint8."""
    hidden, weight = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(300, 8, device=device)
    target = torch.tensor([0, 156, 2, 255], device=device, dtype=torch.uint8)
    ours, exact = linear_cross_entropy(hidden, weight, target), F.cross_entropy(F.linear(hidden, weight), target.long())
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(torch.autograd.grad(ours, hidden)[0], torch.autograd.grad(exact, hidden)[0])


def test_a_loss_divided_in_place(device: str) -> None:
    hidden, weight = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(9, 8, device=device)
    loss = linear_cross_entropy(hidden, weight, torch.arange(4, device=device))
    loss /= 2
    loss.backward()
    exact = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), torch.arange(4, device=device)) / 2, hidden)[0]
    torch.testing.assert_close(hidden.grad, exact)
