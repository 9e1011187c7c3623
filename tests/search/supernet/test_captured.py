"""Steps captured as CUDA graphs, against the same steps as written."""

from __future__ import annotations

import copy

import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.search.spaces import load_space
from ridgeline.search.supernet.network import make_supernet
from ridgeline.search.supernet.step import SearchStep, make_optimisers, set_rate

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch(seed: int, device: str, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, generator=random).to(device), torch.randint(0, 10, (count,), generator=random).to(device)


def test_a_graph_needs_cuda() -> None:
    supernet = make_supernet(load_space("nb201", channels=4, cells=1, image=8))
    with pytest.raises(OptionError, match="captured"):
        SearchStep(supernet, *make_optimisers(supernet), graph=True)


def test_channels_last_images_are_the_same() -> None:
    supernet = make_supernet(load_space("darts", channels=4, cells=3, image=8)).double()
    x = batch(0, "cpu", 2)[0].double()
    assert torch.allclose(supernet(x), supernet(x.to(memory_format=torch.channels_last)), atol=1e-12)


@on_gpu
@pytest.mark.parametrize("policy", ["all", "top_k", "partial"])
@pytest.mark.parametrize("depthwise", ["torch", "triton"])
def test_captured_steps_are_the_steps(policy: str, depthwise: str) -> None:
    first = make_supernet(load_space("darts", channels=8, cells=3, image=8), policy=policy, depthwise=depthwise).cuda()
    second = copy.deepcopy(first)
    captured, written = (SearchStep(net, *make_optimisers(net), graph=graph) for net, graph in ((first, True), (second, False)))
    for number in range(8):
        for step in (captured, written):
            set_rate(step.weight_optimiser, 0.01 / (1 + number))
        losses = [step(batch(number, "cuda"), batch(number + 100, "cuda")) for step in (captured, written)]
        torch.testing.assert_close(losses[0].weights, losses[1].weights, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(losses[0].architecture, losses[1].architecture, rtol=2e-3, atol=2e-3)
    assert captured.captures == 1 and written.captures == 0
    first.eval()(batch(0, "cuda")[0])  # other ops, other indices: the graph keeps its own
    first.train()
    before, after = captured(batch(1, "cuda"), batch(2, "cuda")), captured(batch(3, "cuda"), batch(4, "cuda"))
    assert float(before.weights) != float(after.weights) and torch.isfinite(after.weights)
    assert torch.isfinite(captured(batch(5, "cuda", 4), batch(6, "cuda", 4)).weights)  # another shape


@on_gpu
@pytest.mark.parametrize("estimator", ["straight_through", "score"])
@pytest.mark.parametrize("name", ["darts", "nb201"])
def test_captured_draws_are_the_draws(name: str, estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for every draw, against the drawn ops' kernels alone: losses, gradients and parameters, step after step."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    space = load_space(name, channels=8, cells=3 if name == "darts" else 1, image=8)
    first = make_supernet(space, policy="sample", estimator=estimator).cuda()
    second = copy.deepcopy(first)
    captured, written = (SearchStep(net, *make_optimisers(net), graph=graph) for net, graph in ((first, True), (second, False)))
    seen = set()
    for number in range(7):  # 3 as written in the masked form, 4 replayed
        losses = [step(batch(number, "cuda"), batch(number + 100, "cuda")) for step in (captured, written)]
        torch.testing.assert_close(losses[0].weights, losses[1].weights, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(losses[0].architecture, losses[1].architecture, rtol=2e-3, atol=2e-3)
        assert first.draws == second.draws == 2 * number + 2 and first.skipped_share == second.skipped_share
        seen.add(first.skipped_share)
        for (key, mine), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert float((mine.grad - theirs.grad).norm()) <= 2e-2 * float(theirs.grad.norm()) + 1e-4, (number, key)
            if ".mixed." in key:
                assert not mine.grad[(theirs.grad == 0).flatten(1).all(1)].any(), (number, key)  # not drawn: exactly zero
    assert captured.captures == 1 and len(seen) > 3
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-3, atol=5e-3)
    assert torch.isfinite(captured(batch(5, "cuda", 4), batch(6, "cuda", 4)).weights)  # another shape
    assert captured(batch(5, "cuda")).architecture is None  # weights only: one draw


@on_gpu
def test_sampled_steps_and_bf16() -> None:
    for policy in ("sample", "all"):
        supernet = make_supernet(load_space("darts", channels=8, cells=3, image=8), policy=policy).cuda()
        step = SearchStep(supernet, *make_optimisers(supernet), precision="bf16")
        weights = supernet.architecture.weights.detach().clone()
        losses = [float(step(batch(0, "cuda"), batch(1, "cuda")).weights) for _ in range(12)]
        assert min(losses[6:]) < losses[0] and not torch.equal(weights, supernet.architecture.weights)
