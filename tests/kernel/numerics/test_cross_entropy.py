"""Cross-entropy against float64; the yardstick in half precision is torch in float32, rounded once: stricter than torch in bf16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from ridgeline.kernel import replace
from ridgeline.kernel.cross_entropy import MEAN, NONE, SUM, cross_entropy
from ridgeline.kernel.library import OPERATORS
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts

LAYOUTS = ("contiguous", "transposed", "broadcast", "sliced", "offset")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in answers whatever the table of wins says."""
    monkeypatch.setattr(replace, "_everywhere", True)
    yield


def stand_in(*args: object, **kwargs: object) -> object:
    return replace.REPLACEMENTS[F.cross_entropy][1](*args, **kwargs)


def targets(rows: int, classes: int, device: str) -> torch.Tensor:
    """One row ignored, one of the first and one of the last class."""
    target = torch.randint(classes, (rows,), device=device)
    target[0], target[1], target[2] = 0, classes - 1, -100
    return target


def value_and_gradient(function: object, logits: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, *args, **kwargs)  # type: ignore[operator]
    # the same in every dtype; large, so that `check` sees 1 % of gradients that are spread over many classes
    factors = torch.linspace(12.0, 16.0, max(1, loss.numel())).bfloat16().to(loss).reshape(loss.shape)
    (gradient,) = torch.autograd.grad(loss, leaf, factors)
    return loss.detach(), gradient


def agree(mine: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """`check` with torch's float32 result, rounded, as yardstick; a few float32 numbers to 8 roundings: torch's error may be 0 by luck."""
    if mine.dtype == torch.float32 and mine.numel() < 10:
        torch.testing.assert_close(mine.double(), truth, rtol=2.0**-21, atol=0)
    else:
        check(mine, theirs.to(mine.dtype), truth)


def against_torch(logits: torch.Tensor, target: torch.Tensor, **options: object) -> None:
    """Loss and gradient, ours and torch's, against float64."""
    ours = value_and_gradient(cross_entropy, logits, target, **options)
    plain = value_and_gradient(F.cross_entropy, logits.float(), target, **options)
    exact = value_and_gradient(F.cross_entropy, logits.double(), target, **options)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        agree(mine, theirs, truth)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_in_every_dtype(device: str, dtype: torch.dtype, reduction: str, smoothing: float) -> None:
    logits = (3 * torch.randn(5, 300, device=device)).to(dtype)
    against_torch(logits, targets(5, 300, device), reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(device: str, dtype: torch.dtype, layout: str) -> None:
    logits = dict(layouts((6, 77), dtype, device))[layout]
    against_torch(logits, targets(6, 77, device))


@pytest.mark.parametrize("classes", [1, 5, 8, 9, 256, 257, 1031])
def test_rows_that_start_and_end_anywhere(device: str, classes: int) -> None:
    """A vector is 4 elements in float32 and 8 in bfloat16: every lead, and less than one vector."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(9, classes, device=device).to(dtype)
        target = torch.randint(classes, (9,), device=device)
        ours, gradient = value_and_gradient(cross_entropy, logits, target)
        exact, slope = value_and_gradient(F.cross_entropy, logits.double(), target)
        close = 2.0**-7 if dtype == torch.bfloat16 else 1e-5  # a unit in the last place: the interpreter cuts off
        torch.testing.assert_close(ours.double(), exact, rtol=close, atol=1e-6)
        torch.testing.assert_close(gradient.double(), slope, rtol=close, atol=1e-6)


@pytest.mark.parametrize("chosen", [(1, 1, 1), (2, 4, 1), (4, 2, 3)])
def test_every_kind_of_configuration(device: str, chosen: tuple[int, int, int]) -> None:
    """Several blocks a row and a rest, loads ahead of use or not."""
    configuration = dict(zip(("WARPS", "PER", "STAGES"), chosen, strict=True))
    with forced("cross_entropy", configuration), forced("cross_entropy_backward", configuration):
        for classes in (5003, 5008):
            against_torch(torch.randn(4, classes, device=device), targets(4, classes, device), label_smoothing=0.2)


def test_a_padded_vocabulary_is_not_copied(device: str) -> None:
    padded = torch.randn(5, 64, device=device, dtype=torch.bfloat16)
    against_torch(padded[:, :50], targets(5, 50, device))
    against_torch(padded[:, 3:53], targets(5, 50, device))


def test_large_logits_keep_the_digits_of_a_small_loss(device: str) -> None:
    """Losses of 5e-5 at logits of 3000, whose own spacing is 2.4e-4. 1 + 5e-5 is rounded to 6e-8 by torch and by us: many rows, as the
    error of one is chance."""
    logits = torch.randn(48, 50, device=device)
    target = logits.argmax(1)
    logits[torch.arange(48, device=device), target] += 12
    against_torch(logits + 3000, target, reduction="none")


def test_classes_ruled_out(device: str) -> None:
    for lowest in (-torch.inf, torch.finfo(torch.float32).min):
        logits = torch.randn(5, 40, device=device)
        logits[:, 7:30] = lowest
        against_torch(logits, torch.tensor([0, 1, 35, -100, 39], device=device))
    flat = torch.full((3, 40), torch.finfo(torch.float32).min, device=device)
    target = torch.tensor([0, 5, 39], device=device)
    torch.testing.assert_close(cross_entropy(flat, target), F.cross_entropy(flat, target))
    flat[:] = -torch.inf
    assert cross_entropy(flat, target).isnan()


def test_nan_and_infinity_reach_the_loss(device: str) -> None:
    for bad in (torch.nan, torch.inf):
        logits = torch.randn(3, 40, device=device)
        logits[1, 5] = bad
        loss = cross_entropy(logits, torch.tensor([1, 2, 3], device=device), reduction="none")
        assert loss.isnan().tolist() == [False, True, False]


def test_ignored_rows_count_for_nothing(device: str) -> None:
    logits = torch.randn(4, 30, device=device)
    target = torch.tensor([3, 3, 5, 3], device=device)
    against_torch(logits, target, ignore_index=3)
    logits[0] = torch.nan
    loss, gradient = value_and_gradient(cross_entropy, logits, target, ignore_index=3)
    assert loss.isfinite() and not gradient[0].any()
    nothing = torch.full((4,), -100, device=device)
    loss, gradient = value_and_gradient(cross_entropy, torch.randn(4, 30, device=device), nothing)
    assert loss.isnan() and not gradient.any()
    assert float(cross_entropy(logits, nothing, reduction="sum")) == 0.0


@pytest.mark.parametrize("wrong", [30, -1, 1 << 40])
def test_a_target_out_of_range_is_nan(device: str, wrong: int) -> None:
    target = torch.tensor([3, wrong, 5], device=device)
    loss, gradient = value_and_gradient(cross_entropy, torch.randn(3, 30, device=device), target, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient.isnan().any(1).tolist() == [False, True, False] and gradient[1].isnan().all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(device: str, reduction: str) -> None:
    logits, target = torch.randn(0, 30, device=device), torch.empty(0, dtype=torch.int64, device=device)
    ours, plain = cross_entropy(logits, target, reduction=reduction), F.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(ours, plain, equal_nan=True)


def test_more_rows_than_one_program_adds_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.kernel.cross_entropy.FEW_ROWS", 4)
    for reduction in ("mean", "sum"):
        against_torch(torch.randn(7, 30, device=device), targets(7, 30, device), reduction=reduction)


def test_gradcheck(device: str) -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    target = targets(3, 5, device)
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(
            lambda x, r=reduction: cross_entropy(x, target, reduction=r, label_smoothing=0.1), (logits,), fast_mode=True
        )


def test_gradient_of_each_row_may_be_broadcast(device: str) -> None:
    logits = torch.randn(5, 40, device=device, requires_grad=True)
    target = targets(5, 40, device)
    (ours,) = torch.autograd.grad(cross_entropy(logits, target, reduction="none").sum(), logits)
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="none").sum(), logits)
    torch.testing.assert_close(ours, plain)


def test_same_bits_every_time(device: str) -> None:
    logits, target = torch.randn(6, 500, device=device).bfloat16(), targets(6, 500, device)
    first, second = (value_and_gradient(cross_entropy, logits, target) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_a_wide_loss_of_half_precision_logits(device: str) -> None:
    logits, target = torch.randn(6, 300, device=device).bfloat16(), targets(6, 300, device)
    check(cross_entropy(logits, target, wide=True), F.cross_entropy(logits.float(), target), F.cross_entropy(logits.double(), target))


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_kernels_and_reference_agree(device: str, reduction: int) -> None:
    logits, target = torch.randn(6, 300, device=device), targets(6, 300, device)
    arguments = (logits, target, -100, 0.1, reduction, False)
    ours, plain = torch.ops.ridgeline.cross_entropy(*arguments), OPERATORS["cross_entropy"].reference(*arguments)
    grad = torch.ones_like(ours[0])
    last = 3 * 6 if reduction == NONE else None  # rows that count are not needed, and not written, without a reduction
    torch.testing.assert_close((ours[0], ours[1][:last]), (plain[0], plain[1][:last]))
    arguments = (grad, logits, target, plain[1], -100, 0.1, reduction)
    torch.testing.assert_close(
        torch.ops.ridgeline.cross_entropy_backward(*arguments), OPERATORS["cross_entropy_backward"].reference(*arguments)
    )


def test_opcheck(device: str) -> None:
    target = targets(3, 40, device)
    for logits in (torch.randn(3, 40, device=device, requires_grad=True), torch.randn(40, 3, device=device).t()):
        torch.library.opcheck(torch.ops.ridgeline.cross_entropy.default, (logits, target, -100, 0.1, MEAN, False))
    stats = torch.ops.ridgeline.cross_entropy(logits, target, -100, 0.1, MEAN, False)[1]
    torch.library.opcheck(
        torch.ops.ridgeline.cross_entropy_backward.default, (torch.ones((), device=device), logits, target, stats, -100, 0.1, MEAN)
    )


def test_wrong_arguments_are_named(device: str) -> None:
    logits = torch.randn(4, 10, device=device)
    with pytest.raises(ValueError, match=r"expected \[N, V\] and \[N\]"):
        cross_entropy(logits, torch.zeros(5, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="class indices"):
        cross_entropy(logits, torch.zeros(4, device=device))


@pytest.mark.usefixtures("everywhere")
def test_stand_in_takes_what_torch_takes(device: str) -> None:
    logits, target = torch.randn(5, 30, device=device).bfloat16(), targets(5, 30, device).clamp(min=0)
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": int(target[1])}):
        agree(stand_in(logits, target, **options), F.cross_entropy(logits.float(), target, **options),
              F.cross_entropy(logits.double(), target, **options))  # fmt: skip
    assert torch.equal(
        stand_in(logits, target, None, None, 7, None, "sum", 0.0), cross_entropy(logits, target, ignore_index=7, reduction="sum")
    )


@pytest.mark.usefixtures("everywhere")
def test_stand_in_leaves_the_rest_to_torch(device: str) -> None:
    logits, target = torch.randn(5, 30, device=device), targets(5, 30, device)
    for arguments in (
        (logits, torch.softmax(logits, 1)),  # probabilities
        (logits[0], target[0]),
        (logits[:, :, None], target[:, None]),
        (logits, target[:4]),
        (logits, target.int()),
        (logits, target, torch.ones(30, device=device)),
        (logits, target, None, True),
        (logits, target, None, None, -100, None, "median"),
        (logits, target, None, None, -100, None, "mean", 1.5),
    ):
        assert stand_in(*arguments) is NotImplemented


@pytest.mark.usefixtures("everywhere")
def test_stand_in_under_autocast_gives_a_float32_loss(device: str) -> None:
    logits, target = torch.randn(5, 30, device=device).bfloat16().requires_grad_(), targets(5, 30, device)
    with torch.autocast(device, torch.bfloat16):
        loss = stand_in(logits, target)
    assert isinstance(loss, torch.Tensor)
    check(loss.detach(), F.cross_entropy(logits.detach().float(), target), F.cross_entropy(logits.detach().double(), target))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == torch.bfloat16


def test_stand_in_waits_for_a_measurement(device: str) -> None:
    if device == "cpu":
        assert stand_in(torch.randn(5, 30), targets(5, 30, device)) is NotImplemented


@pytest.mark.usefixtures("everywhere")
def test_traced_by_dynamo(device: str) -> None:
    def step(logits: torch.Tensor, target: torch.Tensor) -> object:
        return stand_in(logits, target, label_smoothing=0.1)

    logits, target = torch.randn(5, 30, device=device), targets(5, 30, device)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours, plain = value_and_gradient(compiled, logits, target), value_and_gradient(F.cross_entropy, logits, target, label_smoothing=0.1)
    torch.testing.assert_close(ours, plain)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(333, 32000), (64, 128256), (130, 50257), (70000, 40)])
def test_real_vocabularies(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    reduction = "mean" if dtype == torch.float32 else "sum"  # a mean's gradients are too small for `check` to see 1 % in bfloat16
    against_torch((2 * torch.randn(shape, device="cuda")).to(dtype), targets(*shape, "cuda"), reduction=reduction)


@ON_GPU
def test_more_than_2_to_the_31_elements() -> None:
    logits = torch.randn(17000, 128256, device="cuda", dtype=torch.bfloat16)
    target = targets(17000, 128256, "cuda")
    ours, gradient = value_and_gradient(cross_entropy, logits, target, reduction="none")
    last = slice(-3, None)
    exact = F.cross_entropy(logits[last].double(), target[last], reduction="none")
    torch.testing.assert_close(ours[last].double(), exact, rtol=4e-3, atol=0)
    assert torch.equal(gradient[last].abs().argmax(1), target[last])


def test_narrow_targets(device: str) -> None:
    """Compared in their own dtype, -100 would be the class 156 of a uint8, and 300 classes 44 of an int8."""
    logits = torch.randn(5, 300, device=device, requires_grad=True)
    for dtype, classes in ((torch.uint8, (0, 156, 2, 255, 4)), (torch.int8, (0, -100, 2, 127, 4)), (torch.int16, (0, -100, 299, 1, 4))):
        target = torch.tensor(classes, device=device, dtype=dtype)
        exact = F.cross_entropy(logits, target.long())
        slope = torch.autograd.grad(exact, logits)[0]
        ours = cross_entropy(logits, target)
        torch.testing.assert_close(ours, exact)
        torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], slope)
        known = OPERATORS["cross_entropy"].reference(logits.detach(), target, -100, 0.0, MEAN, False)
        torch.testing.assert_close(known[0], exact.detach())
        one = torch.ones((), device=device)
        found = OPERATORS["cross_entropy_backward"].reference(one, logits.detach(), target, known[1], -100, 0.0, MEAN)
        torch.testing.assert_close(found, slope)
