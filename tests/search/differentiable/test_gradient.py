"""Second-order gradient and Hessian products against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ridgeline.search.differentiable import gradient


class Mixed(nn.Module):
    """Two layers whose activation is a mixture; small enough for a dense Hessian."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.mixture = nn.Parameter(torch.randn(2, 3) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        share = self.mixture.softmax(-1)
        for row, layer in zip(share, (self.first, self.second), strict=True):
            y = layer(x)
            x = row[0] * torch.tanh(y) + row[1] * y + row[2] * torch.sin(2 * y)
            x = self.norm(x) if layer is self.first else x
        return x


def make() -> tuple[Mixed, list[nn.Parameter], list[nn.Parameter], list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(3)
    model = Mixed().double()
    weights = [p for name, p in model.named_parameters() if name != "mixture"]
    batches = [(torch.randn(16, 5, dtype=torch.float64), torch.randint(3, (16,))) for _ in range(2)]
    return model, weights, [model.mixture], batches


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def brute_force(model: Mixed, batches: list[tuple[Tensor, Tensor]], rate: float, momentum: list[Tensor], decay: float) -> Tensor:
    """Backward through the whole step, all of it in autograd's graph."""
    names = [name for name, _ in model.named_parameters() if name != "mixture"]
    values = dict(model.named_parameters())
    taken = torch.autograd.grad(loss_of(model, batches[0]), [values[n] for n in names], create_graph=True)
    after = {n: values[n] - rate * (m + g + decay * values[n]) for n, g, m in zip(names, taken, momentum, strict=True)}
    valid = functional.cross_entropy(functional_call(model, {**after, "mixture": model.mixture}, (batches[1][0],)), batches[1][1])
    return torch.autograd.grad(valid, model.mixture)[0]


@pytest.mark.parametrize(("method", "bound"), [("exact", 1e-12), ("difference", 1e-4)])
def test_second_order_equals_backward_through_the_step(method: gradient.Method, bound: float) -> None:
    model, weights, architecture, batches = make()
    momentum = [torch.randn_like(p) for p in weights]
    wanted = brute_force(model, batches, 0.3, momentum, 0.01)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with gradient.buffers_kept(model):
        value, found = gradient.unrolled_gradient(
            lambda: loss_of(model, batches[0]), lambda: loss_of(model, batches[1]), weights, architecture,
            rate=0.3, momentum=momentum, weight_decay=0.01, method=method,
        )  # fmt: skip
    assert (found[0] - wanted).abs().max() <= bound * wanted.abs().max()
    assert value.isfinite()
    first = gradient.gradients(loss_of(model, batches[1]), architecture)[0]
    assert (first - wanted).abs().max() > 0.05 * wanted.abs().max()  # the second-order part is not small here
    model.load_state_dict({**model.state_dict(), **{n: v for n, v in before.items() if n.startswith("norm")}})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("method", "bound"), [("exact", 1e-6), ("difference", 1e-3)])
def test_eigenvalue_is_the_dense_hessians(method: gradient.Method, bound: float) -> None:
    model, _, architecture, batches = make()
    point = model.mixture.detach()

    def at(mixture: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, {"mixture": mixture}, (batches[0][0],)), batches[0][1])

    dense = torch.autograd.functional.hessian(at, point).reshape(6, 6)
    values = torch.linalg.eigvalsh(dense)
    wanted = float(values[values.abs().argmax()])
    found = gradient.dominant_eigenvalue(lambda: loss_of(model, batches[0]), architecture, iterations=500, tolerance=1e-9, method=method)
    assert found == pytest.approx(wanted, rel=bound)


def test_a_loss_that_is_linear_has_no_curvature() -> None:
    parameter = nn.Parameter(torch.randn(4, dtype=torch.float64))
    assert gradient.dominant_eigenvalue(lambda: (3 * parameter).sum(), [parameter]) == 0.0
    other = nn.Parameter(torch.randn(2, dtype=torch.float64))
    assert gradient.mixed_product(lambda: (3 * parameter).sum(), [parameter], [other], [torch.ones_like(parameter)])[0].abs().sum() == 0
