"""LSTM, GRU and plain recurrent layers on a chip: both products of each step on arrays, gates digital in float32.

    x (T, B, I) ──weight_ih, all steps in one product──> (T, B, gates * H) ─┐
    h (B, H) ──weight_hh, one product a step───────────> (B, gates * H) ────┴─ gates ──> h', c' ──(weight_hr)──> h'
      LSTM   i, f, g, o:  c' = f c + i g,  h' = o tanh(c')
      GRU    r, z, n:     n = tanh(x_n + r h_n),  h' = n + z (h - n)
      RNN    h' = tanh or relu (x + h)

Parameters have torch's names (weight_ih_l0, weight_hh_l0_reverse, …). Layers, both directions, batch_first, dropout, proj_size, packed
sequences and inputs without a batch are as torch's. Each weight's product is a module under `arrays`, with its own scales and noise.
Cells of weight_hh and weight_hr are read anew at every step; those of weight_ih once a pass, as all its steps are one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ...target.crossbar import CrossbarSpec
from .layers import multiply_rows
from .product import CrossbarProduct, off_autocast, result_dtype

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
State = tuple[Tensor, Tensor]


class CrossbarRecurrent(nn.Module):
    """In the place of nn.LSTM, nn.GRU and nn.RNN."""

    def __init__(self, digital: nn.LSTM | nn.GRU | nn.RNN, chip: CrossbarSpec, *, layer: int = 0, **options: Any) -> None:
        super().__init__()
        self.mode, self.input_size, self.hidden_size = digital.mode, digital.input_size, digital.hidden_size
        self.num_layers, self.bidirectional, self.batch_first = digital.num_layers, digital.bidirectional, digital.batch_first
        self.bias, self.dropout, self.proj_size = digital.bias, digital.dropout, digital.proj_size
        for name, parameter in digital.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        weights = [name for name, _ in self.named_parameters(recurse=False) if name.startswith("weight")]
        self.arrays = nn.ModuleDict({name: CrossbarProduct(chip, layer=layer + at, **options) for at, name in enumerate(weights)})
        self.train(digital.training)

    def flatten_parameters(self) -> None:
        """Torch's layers have it; there is nothing to flatten."""

    def forward(self, x: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """As torch's: (output, h) or (output, (h, c))."""
        packed = isinstance(x, PackedSequence)
        if isinstance(x, PackedSequence):
            padded, lengths = pad_packed_sequence(x)  # (T, B, I), in the order the caller had
        else:
            padded, lengths = (x.transpose(0, 1) if self.batch_first and x.dim() == 3 else x), None
        alone = padded.dim() == 2
        sequence = padded.unsqueeze(1) if alone else padded
        steps, batch = sequence.shape[:2]
        valid = None if lengths is None else (torch.arange(steps)[:, None] < lengths[None]).to(sequence.device)[..., None]
        out, h, c = self._layers(sequence, self._start(hx, batch, sequence, alone), valid)
        for product in self.arrays.values():
            product.advance(steps)  # type: ignore[operator]
        kind = result_dtype(padded)
        out, h, c = out.to(kind), h.to(kind), c.to(kind)
        if isinstance(x, PackedSequence) and lengths is not None:
            again = pack_padded_sequence(out, lengths, enforce_sorted=False)
            return again, ((h, c) if self.mode == "LSTM" else h)
        if alone:
            out, h, c = out.squeeze(1), h.squeeze(1), c.squeeze(1)
        elif self.batch_first and not packed:
            out = out.transpose(0, 1)
        return out, ((h, c) if self.mode == "LSTM" else h)

    def _start(self, hx: Any, batch: int, like: Tensor, alone: bool) -> State:
        """h (layers * directions, B, H or proj) and c, float32: given, or zeros."""
        count, wide = self.num_layers * (2 if self.bidirectional else 1), torch.promote_types(like.dtype, torch.float32)
        zeros_h = torch.zeros(count, batch, self.proj_size or self.hidden_size, dtype=wide, device=like.device)
        zeros_c = torch.zeros(count, batch, self.hidden_size, dtype=wide, device=like.device)
        if hx is None:
            return zeros_h, zeros_c
        h, c = hx if self.mode == "LSTM" else (hx, zeros_c)
        given = h.unsqueeze(1) if alone else h
        return given.to(wide), (c.unsqueeze(1) if alone and c.dim() == 2 else c).to(wide)

    def _layers(self, sequence: Tensor, start: State, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        last_h, last_c = [], []
        for layer in range(self.num_layers):
            sides = []
            for side, suffix in enumerate(("", "_reverse") if self.bidirectional else ("",)):
                at = layer * (2 if self.bidirectional else 1) + side
                out, h, c = self._direction(sequence, (start[0][at], start[1][at]), f"l{layer}{suffix}", valid)
                sides.append(out)
                last_h.append(h)
                last_c.append(c)
            sequence = torch.cat(sides, -1)
            if self.dropout and self.training and layer < self.num_layers - 1:
                sequence = functional.dropout(sequence, self.dropout)
        return sequence, torch.stack(last_h), torch.stack(last_c)

    def _direction(self, sequence: Tensor, state: State, name: str, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(T, B, I) → (T, B, H): one layer, one direction; where a sequence has ended its state waits and its output is 0."""
        with off_autocast(sequence):
            wide = sequence.to(state[0].dtype)
            driven = self._product(f"weight_ih_{name}", f"bias_ih_{name}", wide)  # (T, B, gates * H)
            outputs: list[Tensor] = [state[0]] * len(wide)
            steps = range(len(wide))
            for at, step in enumerate(reversed(steps) if name.endswith("_reverse") else steps):
                fed_back = self._product(f"weight_hh_{name}", f"bias_hh_{name}", state[0], later=at)
                h, c = self._gates(driven[step], fed_back, state)
                if self.proj_size:
                    h = self._product(f"weight_hr_{name}", None, h, later=at)
                outputs[step] = h if valid is None else torch.where(valid[step], h, torch.zeros_like(h))
                state = (h, c) if valid is None else (torch.where(valid[step], h, state[0]), torch.where(valid[step], c, state[1]))
            return torch.stack(outputs), *state

    def _product(self, weight: str, bias: str | None, x: Tensor, later: int = 0) -> Tensor:
        shift = getattr(self, bias) if bias is not None and self.bias else None
        product: Any = self.arrays[weight]
        return multiply_rows(product, x, getattr(self, weight), shift, later=later)

    def _gates(self, driven: Tensor, fed_back: Tensor, state: State) -> State:
        h, c = state
        if self.mode == "LSTM":
            take, keep, new, give = (driven + fed_back).chunk(4, -1)
            c = keep.sigmoid() * c + take.sigmoid() * new.tanh()
            return give.sigmoid() * c.tanh(), c
        if self.mode == "GRU":
            (reset, update, new), (reset_h, update_h, new_h) = driven.chunk(3, -1), fed_back.chunk(3, -1)
            candidate = (new + (reset + reset_h).sigmoid() * new_h).tanh()
            return candidate + (update + update_h).sigmoid() * (h - candidate), c
        both = driven + fed_back
        return (both.relu() if self.mode == "RNN_RELU" else both.tanh()), c
