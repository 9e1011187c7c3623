"""How decided the architecture is: entropy, divergence from uniform, mutual information, Gini, all from one log-softmax.

    logits or shares [..., rows, n] ──measure_shares──> Measures: entropy [rows], kl [rows], gini [rows], mutual_information []
      entropy H(p) = -Σ p log p [nat]      kl(p ‖ q) = Σ p (log p - log q), q uniform unless given
      mutual information of (row, choice), rows equally likely: H(mean p) - mean H(p) = mean KL(p ‖ mean p)
      gini = 1 - Σ p²  (chance that two draws differ; 0 decided)

0 log 0 is 0; weights of -inf are shares of 0; p > 0 where q = 0 gives an infinite KL. Nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Measures:
    entropy: Tensor
    kl: Tensor
    gini: Tensor
    mutual_information: Tensor


def measure_shares(values: Tensor, *, logits: bool = True, reference: Tensor | None = None) -> Measures:
    """Of logits, or of shares that sum to 1; `reference` shares [..., n] for the KL."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    log_p = torch.log_softmax(wide, dim=-1) if logits else wide.log()
    p = log_p.exp() if logits else wide
    entropy = -_times_log(p, log_p).sum(-1)
    log_q: Tensor | float = -math.log(values.shape[-1]) if reference is None else reference.to(wide.dtype).log()
    gap = torch.where(p > 0, log_p - log_q, 0.0)
    mean = p.mean(-2)
    # as a mean of divergences: the difference of two entropies loses all digits where the rows agree
    apart = torch.where(p > 0, log_p - mean.log().unsqueeze(-2), 0.0)
    return Measures(entropy, (p * gap).sum(-1), (p * (1 - p)).sum(-1), (p * apart).sum(-1).mean(-1).clamp_min(0.0))


def _times_log(p: Tensor, log_p: Tensor) -> Tensor:
    """p log p with 0 log 0 = 0; where keeps the gradient finite too."""
    return p * torch.where(p > 0, log_p, 0.0)
