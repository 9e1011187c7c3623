"""The distillation loss against float64 sums written out term by term, and its gradient against differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.errors import TransformError
from ridgeline.transform.distil_loss import distillation_loss, hard_loss, soft_loss
from tests.support import full_or_tenth


def log_softmax(row: list[float], temperature: float) -> list[float]:
    top = max(row)
    total = math.log(math.fsum(math.exp((value - top) / temperature) for value in row))
    return [(value - top) / temperature - total for value in row]


def brute_force(student: Tensor, teacher: Tensor, targets: Tensor, temperature: float, alpha: float) -> float:
    """Row by row, class by class."""
    classes = student.shape[-1]
    soft = hard = 0.0
    count = 0
    for s, t, y in zip(
        student.reshape(-1, classes).tolist(), teacher.reshape(-1, classes).tolist(), targets.flatten().tolist(), strict=True
    ):
        if y == -100:
            continue
        count += 1
        q, p = log_softmax(s, temperature), log_softmax(t, temperature)
        soft += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        hard -= log_softmax(s, 1.0)[y]
    return alpha * temperature**2 * soft / max(count, 1) + (1 - alpha) * hard / max(count, 1)


def logits(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(shape[-1], shape[:-1], generator=random)
    return student, teacher, targets


@settings(max_examples=full_or_tenth(200), deadline=None)
@given(
    shape=st.sampled_from([(5, 7), (1, 2), (2, 3, 11), (4, 1, 5)]),
    seed=st.integers(0, 999),
    temperature=st.floats(0.5, 20),
    alpha=st.floats(0, 1),
    ignored=st.floats(0, 1),
)
def test_loss_is_the_sum_written_out(shape: tuple[int, ...], seed: int, temperature: float, alpha: float, ignored: float) -> None:
    student, teacher, targets = logits(shape, seed)
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < ignored] = -100
    loss = distillation_loss(student, teacher, targets, temperature=temperature, alpha=alpha)
    assert loss.item() == pytest.approx(brute_force(student, teacher, targets, temperature, alpha), rel=1e-9, abs=1e-12)


def test_a_planted_scale_error_would_be_seen() -> None:
    student, teacher, targets = logits((5, 7), 0)
    right = brute_force(student, teacher, targets, 3.0, 0.7)
    assert distillation_loss(student, teacher, targets).item() == pytest.approx(right, rel=1e-9)
    assert distillation_loss(1.01 * student, teacher, targets).item() != pytest.approx(right, rel=1e-4)
    assert distillation_loss(teacher, student, targets).item() != pytest.approx(right, rel=1e-2), "KL is not symmetric"


def test_gradient_is_right_and_the_teacher_gets_none() -> None:
    student, teacher, targets = logits((3, 2, 5), 1)
    targets[0, 1] = -100
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: distillation_loss(s, teacher, targets, temperature=2.0, alpha=0.3), (student,))
    teacher.requires_grad_()
    distillation_loss(student, teacher, targets).backward()
    assert teacher.grad is None
    assert student.grad is not None and not student.grad[0, 1].any() and student.grad[0, 0].any(), "an ignored token gets no gradient"


def test_gradient_of_the_soft_term_does_not_shrink_with_temperature() -> None:
    """At high T the gradient tends to (s − t) / classes, centred, whatever T: what T² is for (Hinton 2015, equation 4)."""
    student, teacher, _ = logits((1, 6), 2)
    student.requires_grad_()
    soft_loss(student, teacher, temperature=1e4).backward()
    difference = student.detach() - teacher
    assert torch.allclose(student.grad, (difference - difference.mean()) / 6, rtol=1e-2, atol=1e-4)


def test_equal_logits_have_no_soft_loss_and_nothing_that_counts_no_loss() -> None:
    student, teacher, targets = logits((4, 3), 3)
    assert soft_loss(student, student, temperature=5.0).item() == pytest.approx(0.0, abs=1e-15)
    nothing = torch.full_like(targets, -100)
    student.requires_grad_()
    loss = distillation_loss(student, teacher, nothing)
    loss.backward()
    assert loss.item() == 0.0 and student.grad is not None and not student.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maths_is_in_float32_also_under_autocast(dtype: torch.dtype) -> None:
    student, teacher, targets = (x.to(dtype) if x.is_floating_point() else x for x in logits((64, 50), 4))
    student = student * 40  # exp of these overflows float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = distillation_loss(student, teacher, targets, temperature=1.0, alpha=0.5)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(brute_force(student.double(), teacher.double(), targets, 1.0, 0.5), rel=1e-5)


def test_features_are_added_with_beta() -> None:
    student, teacher, targets = logits((4, 3), 5)
    extra = torch.tensor(2.0, dtype=torch.float64)
    plain = distillation_loss(student, teacher, targets)
    assert distillation_loss(student, teacher, targets, features=extra).item() == pytest.approx(plain.item() + 0.2)
    assert distillation_loss(student, teacher, targets, alpha=0.0).item() == pytest.approx(hard_loss(student, targets).item())


def test_shapes_that_do_not_fit_are_refused() -> None:
    student, teacher, targets = logits((4, 3), 6)
    with pytest.raises(TransformError, match=r"\[4, 3\] and teacher logits \[4, 2\]"):
        distillation_loss(student, teacher[:, :2], targets)
    with pytest.raises(TransformError, match="each target needs one row"):
        distillation_loss(student, teacher, targets[:2])
