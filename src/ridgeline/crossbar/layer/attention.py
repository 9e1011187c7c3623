"""Attention on a chip: the projections of nn.MultiheadAttention, and, where asked for, the products of activations.

    query, key, value ──q, k, v projections on arrays──> heads ──scores, softmax, values──> out_proj on arrays
    CrossbarMatmul   a (…, M, K) times b (…, K, N): b is written into cells for this one product, a drives the rows
    on_arrays(model) F.scaled_dot_product_attention anywhere inside the model's forward runs on a pair of CrossbarMatmul

Softmax, masks and scaling are digital. Writing cells for every product costs what a chip's writes cost; that is what it shows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...target.crossbar import CrossbarSpec
from ..engine.patches import ONE_TAP
from .layers import CrossbarLinear, multiply_rows
from .product import CrossbarProduct, result_dtype


class CrossbarMatmul(CrossbarProduct):
    """Both operands are activations."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(…, M, K) times (…, K, N), with the same leading axes."""
        self._prepared = None  # what was written is not kept: the next call's tensor may lie at the same address
        *lead, rows, k = a.shape
        groups = math.prod(lead)
        signals = a.reshape(groups, rows, k).transpose(1, 2).reshape(1, groups * k, rows)  # groups side by side, one tap each
        cells = b.reshape(groups, k, -1).transpose(1, 2).reshape(-1, k, 1)  # (groups * N, K, 1)
        out = self.multiply(signals, cells, ONE_TAP, groups)  # (1, groups * N, M)
        self.advance()
        return out.reshape(groups, -1, rows).transpose(1, 2).reshape(*lead, rows, b.shape[-1]).to(result_dtype(a))


class AttentionProducts(nn.Module):
    """softmax(q k^T) v with both products on arrays."""

    def __init__(self, chip: CrossbarSpec, *, layer: int = 0, **options: Any) -> None:
        super().__init__()
        self.scores = CrossbarMatmul(chip, layer=layer, **options)
        self.values = CrossbarMatmul(chip, layer=layer + 1, **options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """The arguments of torch's scaled_dot_product_attention."""
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (one.expand(*lead, *one.shape[-2:]) for one in (query, key, value))
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mixed: Tensor = self.values(self.shares(query, key, attn_mask, dropout_p, scale), value)
        return mixed

    def shares(self, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, scale: float | None = None) -> Tensor:
        """(…, T, S): how much each query takes of each value."""
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return functional.dropout(softmax(self.scores(query * factor, key.transpose(-2, -1)), mask), dropout)


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """In float32 at least; a boolean mask keeps what is True, another is added."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        wide = wide.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else wide + mask
    return wide.softmax(-1).to(scores.dtype)


class CrossbarAttention(nn.Module):
    """In the place of nn.MultiheadAttention, with the names of its parameters."""

    _qkv_same_embed_dim = False  # torch's encoder layers look at it: True would let a fused kernel pass the arrays by

    def __init__(self, digital: nn.MultiheadAttention, chip: CrossbarSpec, *, products: bool, layer: int = 0, **options: Any) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = digital.embed_dim, digital.num_heads, digital.batch_first
        self.dropout = digital.dropout
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
            self.register_parameter(name, getattr(digital, name))
        self.arrays = nn.ModuleDict({name: CrossbarProduct(chip, layer=layer + at, **options) for at, name in enumerate("qkv")})
        given = digital.out_proj  # of a subclass of torch's; its parameters are what counts
        plain = nn.Linear(given.in_features, given.out_features, device="meta")
        plain.weight, plain.bias = given.weight, given.bias
        self.out_proj = CrossbarLinear(plain, chip, layer=layer + 3, **options)
        self.products = AttentionProducts(chip, layer=layer + 4, **options) if products else None
        self.train(digital.training)

    @staticmethod
    def able(digital: nn.MultiheadAttention) -> bool:
        return digital.bias_k is None and not digital.add_zero_attn

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
        attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As torch's; masks say True, or minus infinity, where nothing may be seen."""
        alone = query.dim() == 2
        batch_last = not (alone or self.batch_first)
        given = [one.unsqueeze(0) if alone else one.transpose(0, 1) if batch_last else one for one in (query, key, value)]
        heads = [self._heads(at, one) for at, one in enumerate(given)]  # (B, heads, T, E / heads)
        mask = self._mask(heads[0], given[1], key_padding_mask, attn_mask)
        dropped = self.dropout if self.training else 0.0
        if self.products is not None:
            shares = self.products.shares(heads[0], heads[1], mask, dropped)
            mixed = self.products.values(shares, heads[2])
        else:
            scores = heads[0] * heads[0].shape[-1] ** -0.5 @ heads[1].transpose(-2, -1)
            shares = functional.dropout(softmax(scores, mask), dropped)
            mixed = shares @ heads[2]
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        out = out.squeeze(0) if alone else out.transpose(0, 1) if batch_last else out
        if not need_weights:
            return out, None
        shown = shares.mean(1) if average_attn_weights else shares
        return out, shown.squeeze(0) if alone else shown

    def _heads(self, at: int, x: Tensor) -> Tensor:
        whole: Any = self.in_proj_weight
        owner: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[at] if whole is None else whole
        part = slice(at * self.embed_dim, (at + 1) * self.embed_dim)
        bias: Any = self.in_proj_bias
        product: Any = self.arrays["qkv"[at]]
        weight = owner if whole is None else whole[part]
        out = multiply_rows(product, x, weight, None if bias is None else bias[part], owner=owner)
        product.advance()
        heads: Tensor = out.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return heads

    def _mask(self, query: Tensor, key: Tensor, padding: Tensor | None, given: Tensor | None) -> Tensor | None:
        """Both masks as one to add, (B or 1, heads or 1, T, S)."""
        whole = None
        if given is not None:
            whole = _added(given, query)
            whole = whole.unflatten(0, (query.shape[0], -1)) if whole.dim() == 3 else whole
        if padding is not None:
            hidden = _added(padding, query).reshape(key.shape[0], 1, 1, key.shape[1])
            whole = hidden if whole is None else whole + hidden
        return whole


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """True → minus infinity."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, -math.inf)


class _Redirect(TorchFunctionMode):
    """Sends scaled_dot_product_attention to a module."""

    def __init__(self, products: AttentionProducts) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = self.products if func is functional.scaled_dot_product_attention else func
        return wanted(*args, **(kwargs or {}))


def on_arrays(model: nn.Module, products: AttentionProducts) -> None:
    """From now on the model's attention runs on `products`; all its layers share them, each call with noise of its own."""
    model.add_module("crossbar_attention", products)
    open_modes: list[_Redirect] = []

    def enter(module: nn.Module, *_: Any) -> None:
        mode = _Redirect(module.crossbar_attention)  # type: ignore[arg-type]
        mode.__enter__()  # type: ignore[no-untyped-call]
        open_modes.append(mode)

    def leave(*_: Any) -> None:
        open_modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
