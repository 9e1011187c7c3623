"""What a student is taught by: the teacher's soft answers, the right answers, the teacher's inner features.

    L = α · T² · KL(softmax(t/T) ‖ softmax(s/T)) + (1 − α) · CE(s, y) + β · features          [nats]
      s, t [B,C] with y [B], or [B,T,V] with y [B,T]: mean over the targets that count; y = -100 counts in neither term

T² keeps the gradient of the soft term at one size whatever T (Hinton 2015). Maths in float32 at least, also under autocast: a
float16 exp at T = 1 overflows from a logit of 11.1 on. Ref: Romero 2015 (features), Zagoruyko 2017 (attention); see features.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import TransformError
from ..train.loss import IGNORE

TEMPERATURE, ALPHA, BETA = 3.0, 0.7, 0.1


def soft_loss(student: Tensor, teacher: Tensor, targets: Tensor | None = None, *, temperature: float = TEMPERATURE) -> Tensor:
    """T² · KL(teacher ‖ student) at temperature T, mean over the rows whose target counts (all without targets)."""
    _require_same(student, teacher)
    with torch.autocast(student.device.type, enabled=False):
        s, t = _wide(student) / temperature, _wide(teacher.detach()) / temperature
        s, t = s.log_softmax(-1), t.log_softmax(-1)  # [...,V]
        rows = functional.kl_div(s, t, reduction="none", log_target=True).sum(-1).flatten()  # [N]
        return temperature**2 * _mean(rows, targets)


def hard_loss(student: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy with the right answers, mean over those that count."""
    _require_targets(student, targets)
    with torch.autocast(student.device.type, enabled=False):
        flat = _wide(student).flatten(0, -2)  # [N,V]
        rows = functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="none")
        return _mean(rows, targets)


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    *,
    temperature: float = TEMPERATURE,
    alpha: float = ALPHA,
    features: Tensor | None = None,
    beta: float = BETA,
) -> Tensor:
    """The whole loss; `features` is the feature term before β. A term of weight 0 is not computed."""
    _require_targets(student, targets)
    terms = []
    if alpha > 0.0:
        terms.append(alpha * soft_loss(student, teacher, targets, temperature=temperature))
    if alpha < 1.0:
        terms.append((1.0 - alpha) * hard_loss(student, targets))
    if features is not None and beta > 0.0:
        terms.append(beta * features)
    return torch.stack(terms).sum()


def _mean(rows: Tensor, targets: Tensor | None) -> Tensor:
    """Over the rows that count; by weights, since picking rows would make the GPU wait for the host. 0 where none counts."""
    if targets is None:
        return rows.mean()
    counts = targets.flatten() != IGNORE
    return torch.where(counts, rows, 0.0).sum() / counts.sum().clamp(min=1)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _require_same(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise TransformError(
            f"student logits {list(student.shape)} and teacher logits {list(teacher.shape)}",
            why="the two distributions must be over the same classes, for the same samples",
            do="give a teacher with the student's classes (or vocabulary), or teach by features alone: alpha=0",
        )


def _require_targets(student: Tensor, targets: Tensor) -> None:
    if student.dim() < 2 or targets.shape != student.shape[:-1]:
        raise TransformError(
            f"logits {list(student.shape)} with targets {list(targets.shape)}",
            why="each target needs one row of logits",
            do="give logits [B,C] with targets [B], or [B,T,V] with [B,T]",
        )
