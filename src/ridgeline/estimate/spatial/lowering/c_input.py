"""Where the C finds an input: in I itself, or in a copy with zeros around it.

    I [B, G*C, H, W] ──copy──> padded [B*G*C][slow][phase][fast]          zeros outside the image
      slow, fast   y and x, or x and y where P is vectorised: neighbouring lanes read neighbouring elements
      phase        a vectorised stride s puts elements x = phase + s * place of a row next to each other

The copy is made where padding would need tests in the inner loop, where a register reaches past the last output (its extra
lanes are computed from whatever is there and never stored), and where a stride would scatter the lanes. It is part of the
function and of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....core.errors import OptionError
from ..layer import Layer
from .c_terms import Sum, offset_of

MAX_COPY_BYTES = 1 << 30
OUT, TAP = "PQ", "RS"


@dataclass(frozen=True, slots=True)
class InputAccess:
    """Layout of the array the multiply-adds read."""

    layer: Layer
    copied: bool
    fast: int
    """Axis (0: y, 1: x) whose neighbours are neighbours in memory."""
    reach: tuple[int, int]
    """Rows and columns of one channel."""
    phases: int

    @property
    def name(self) -> str:
        return "padded" if self.copied else "I"

    @property
    def span(self) -> int:
        """Elements of one phase of one line."""
        return -(-self.reach[self.fast] // self.phases)

    @property
    def elements(self) -> int:
        return self.layer.dims["B"] * self.strides()["B"]

    def strides(self) -> dict[str, int]:
        """Elements between neighbours along each dimension; a tap along a line cut into phases has no such number and is left out."""
        layer, fast, slow = self.layer, self.fast, 1 - self.fast
        line = self.phases * self.span
        channel = line * self.reach[slow]
        strides = {"C": channel, "G": channel * layer.dims["C"], "B": channel * layer.dims["C"] * layer.dims["G"], "K": 0}
        strides |= {OUT[slow]: layer.stride[slow] * line, TAP[slow]: layer.dilation[slow] * line}
        strides |= {OUT[fast]: layer.stride[fast] // self.phases}
        return strides if self.phases > 1 else strides | {TAP[fast]: layer.dilation[fast]}

    def offset(self, index: Mapping[str, Sum]) -> Sum:
        """Position of I[b, g, c, y(p, r), x(q, s)]."""
        plain = offset_of(index, self.strides())
        if self.phases == 1:
            return plain
        tap = index[TAP[self.fast]].times(self.layer.dilation[self.fast])
        if not tap.terms:
            return plain + Sum((), tap.constant % self.phases * self.span + tap.constant // self.phases)
        return plain + Sum(((f"(({tap}) % {self.phases})", self.span), (f"(({tap}) / {self.phases})", 1)))

    def copy_lines(self) -> list[str]:
        """C that fills `padded`."""
        layer, slow = self.layer, 1 - self.fast
        size, pad = layer.input_size, layer.padding
        step = (size[1], 1)
        channels = layer.dims["B"] * layer.dims["G"] * layer.dims["C"]
        row = f"ch*{self.reach[slow]} + line"
        along = "place" if self.phases == 1 else f"place*{self.phases} + phase"
        heads = [
            f"for (long ch = 0; ch < {channels}; ++ch)",
            f"for (long line = 0; line < {self.reach[slow]}; ++line)",
            *([f"for (long phase = 0; phase < {self.phases}; ++phase)"] if self.phases > 1 else []),
        ]
        body = [
            "{",
            f"  T *to = padded + {f'({row})' if self.phases == 1 else f'(({row})*{self.phases} + phase)'}*{self.span};",
            f"  const long at = line - {pad[slow]};",
            f"  const int real = at >= 0 && at < {size[slow]};",
            f"  const T *from = I + ch*{size[0] * size[1]} + (real ? at*{step[slow]} : 0);",
            f"  for (long place = 0; place < {self.span}; ++place) {{",
            f"    const long along = {along} - {pad[self.fast]};",
            f"    to[place] = real && along >= 0 && along < {size[self.fast]} ? from[along*{step[self.fast]}] : 0;",
            "  }",
            "}",
        ]
        return [
            f"/* the input with zeros around it, lines along {'yx'[self.fast]} */",
            f"static T padded[{self.elements}];",
            *("  " * depth + head for depth, head in enumerate(heads)),
            *("  " * (len(heads) - 1) + line for line in body),
        ]


def input_access(layer: Layer, overrun: Mapping[str, int], vector_dim: str) -> InputAccess:
    """Layout for a nest whose register block reaches `overrun` indices past the end of P and Q."""
    fast = 0 if vector_dim == "P" else 1
    strided = vector_dim == OUT[fast] and layer.stride[fast] > 1
    last = [(layer.dims[OUT[a]] + overrun[OUT[a]] - 1) * layer.stride[a] + (layer.dims[TAP[a]] - 1) * layer.dilation[a] for a in (0, 1)]
    across = fast == 0 and layer.input_size[1] > 1
    inside = all(last[a] < layer.input_size[a] for a in (0, 1)) and not any(layer.padding)
    if inside and not strided and not across:
        return InputAccess(layer, False, 1, layer.input_size, 1)
    access = InputAccess(layer, True, fast, (last[0] + 1, last[1] + 1), layer.stride[fast] if strided else 1)
    if access.elements * 4 > MAX_COPY_BYTES:
        raise OptionError(
            f"layer {layer.name} needs a padded copy of {access.elements * 4} bytes",
            why=f"the emitted C keeps at most {MAX_COPY_BYTES}",
            do="use a smaller batch",
        )
    return access
