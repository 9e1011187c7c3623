"""Linears of one input become one; a shared weight, a computed one or a write in between keeps them apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.transform.graph.passes import merge_qkv
from ridgeline.transform.graph.passes.merge_qkv import CPU_ROWS, MergeLinears
from tests.transform.graph.pattern_cases import Formula, run

ALWAYS = MergeLinears(always=True)


def linears(*widths: int, bias: tuple[bool, ...] | None = None) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width, bias=has, dtype=torch.float64) for width, has in zip(widths, bias or (True,) * len(widths), strict=True)]


class Branches(nn.Module):
    """The outputs of several linears of one input."""

    def __init__(self, parts: list[nn.Linear], again: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.again = again

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [part(x) for part in self.parts]
        return [*found, self.parts[0](x + 1.0)] if self.again else found


def inputs(*shape: int) -> tuple[Tensor]:
    return (torch.randn(shape or (2, 5, 6), dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("bias", [(True, True, True), (False, False, False), (True, False, True)])
def test_widths_and_biases_may_differ(bias: tuple[bool, ...]) -> None:
    ran = run(Branches(linears(4, 2, 8, bias=bias)), inputs(), ALWAYS, "dead")
    assert ran.count("linear") == 1
    assert ran.only("linear").args[1].meta["val"].shape == (14, 6)
    assert len(list(ran.graph.module.buffers())) + len(list(ran.graph.module.parameters())) == (2 if any(bias) else 1)


def test_a_few_rows_are_merged_on_cpus_and_many_are_not() -> None:
    model = Branches(linears(4, 4))
    assert run(model, inputs(1, CPU_ROWS, 6), "merge_qkv", dynamic_batch=False).count("linear") == 1
    many = run(model, inputs(2, 50, 6), "merge_qkv", tolerance=0.0)
    assert many.count("linear") == 2
    assert "no faster" in many.refused[0]


@pytest.mark.parametrize(
    "rows, widths, merged", [(128, (256, 128), True), (129, (256, 128), False), (128, (256, 129), False), (1, (128,), True)]
)
def test_products_that_fill_a_gpu_alone_stay(rows: int, widths: tuple[int, ...], merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 x 128 on a GPU of two processors: the narrowest product decides."""
    monkeypatch.setattr(merge_qkv, "processors_of", lambda device: 2)
    ran = run(Branches(linears(*widths, widths[-1])), inputs(1, rows, 6), "merge_qkv", dynamic_batch=False)
    assert (ran.count("linear") == 1) is merged
    assert merged or "fills the GPU by itself, with 2 tiles" in ran.refused[0]


def test_a_weight_used_elsewhere_stays() -> None:
    ran = run(Branches(linears(4, 4), again=True), inputs(), ALWAYS, tolerance=0.0)
    assert ran.changed == []
    assert any("read elsewhere" in why for why in ran.refused)


def test_a_weight_shared_under_another_name_stays() -> None:
    parts = linears(4, 4)
    parts[1].weight = parts[0].weight
    assert run(Branches(parts), inputs(), ALWAYS, tolerance=0.0).count("linear") == 2


def test_other_inputs_are_no_group() -> None:
    one, two = linears(4, 4)
    ran = run(Branches([one]), inputs(), ALWAYS, tolerance=0.0)
    assert ran.changed == ran.refused == []
    other = Formula(lambda x, w, u: (functional.linear(x, w), functional.linear(x * 2.0, u)), w=one.weight.detach(), u=two.weight.detach())
    assert run(other, inputs(), ALWAYS, tolerance=0.0).changed == []


def test_an_activation_keeps_its_linear() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = linears(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.relu(self.one(x)), self.two(x)

    assert run(Two(), inputs(), ALWAYS, tolerance=0.0).count("linear") == 2


def test_gate_and_up_are_merged() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = linears(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return functional.silu(self.gate(x)) * self.up(x)

    assert run(Gated(), inputs(), ALWAYS).count("linear") == 1


def test_a_view_of_a_part_becomes_a_reshape() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = linears(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x).view(x.size(0), 20) + self.two(x).view(x.size(0), 20)

    assert run(Viewed(), inputs(), ALWAYS).count("linear") == 1


def test_a_write_to_the_input_in_between_is_refused() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = linears(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1.0
            first = self.one(x)
            x.mul_(3.0)
            return first + self.two(x)

    assert run(Written(), inputs(), ALWAYS, tolerance=0.0).count("linear") == 2


def test_writing_into_a_part_is_refused() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = linears(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x).mul_(2.0) + self.two(x)

    assert run(Written(), inputs(), ALWAYS, tolerance=0.0).count("linear") == 2
