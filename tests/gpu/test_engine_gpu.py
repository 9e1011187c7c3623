"""The engine on a GPU: graphs, buckets and bursts give the text of the CPU in float32, and a step waits for the device once."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from ridgeline.llm.engine.engine import Engine  # noqa: E402
from ridgeline.llm.engine.options import EngineOptions  # noqa: E402
from ridgeline.llm.load import Loaded, byte_tokenizer  # noqa: E402
from ridgeline.llm.model.config import ModelConfig  # noqa: E402
from ridgeline.llm.model.weights import random_decoder  # noqa: E402
from ridgeline.llm.sampling import Sampling  # noqa: E402
from tests.llm.engine.support import PROMPTS  # noqa: E402

CONFIG = ModelConfig("llama", vocab=256, hidden=128, layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=192, context=128)
GREEDY = Sampling(max_tokens=24)


def engine(device: str = "cuda", dtype: torch.dtype = torch.float32, **options: object) -> Engine:
    model = random_decoder(CONFIG, dtype=dtype, device="cpu", seed=3).eval().to(device)  # numbers of the CPU on both
    return Engine(Loaded(model, byte_tokenizer(), CONFIG, "tiny", None, (), None), EngineOptions(**{"seed": 1, **options}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [done.tokens for done in engine("cpu").generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    "options",
    [
        {"graphs": "off", "burst": 1},
        {"graphs": "on", "burst": 1},
        {"graphs": "on", "burst": 7},
        {"graphs": "on"},
        {"graphs": "on", "max_batch": 3, "max_step_tokens": 5},
        {"graphs": "on", "pages": 8, "max_batch": 6, "burst": 4},
    ],
    ids=str,
)
def test_float32_text_is_that_of_the_cpu(options: dict[str, object], expected: list[list[int]]) -> None:
    worker = engine(**options)
    assert [done.tokens for done in worker.generate(PROMPTS, GREEDY)] == expected
    assert bool(worker.stats()["graphs"]) == (options["graphs"] == "on")
    assert worker.pool.free == worker.pool.pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_int8", [False, True])
def test_graphs_compute_what_eager_computes(dtype: torch.dtype, kv_int8: bool) -> None:
    """The same kernels in both, and one request: the same bits, also in bfloat16."""
    tokens = [
        engine(dtype=dtype, kv_int8=kv_int8, graphs=graphs, burst=burst, max_batch=1).generate(PROMPTS[0], GREEDY)[0].tokens
        for graphs, burst in (("off", 1), ("on", 1), ("on", 16))
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_seeds_do_not_depend_on_bursts_and_buckets() -> None:
    settings = [Sampling(temperature=0.9, top_p=0.9, top_k=place * 10, seed=place, max_tokens=20) for place in range(6)]
    first = engine(graphs="off", burst=1).generate(PROMPTS, settings)
    second = engine(graphs="on", burst=8).generate(PROMPTS, settings)
    assert [done.tokens for done in first] == [done.tokens for done in second]


def test_all_buckets_are_captured_by_warm_up() -> None:
    worker = engine(max_batch=6, graphs="on")
    assert worker.warm_up() == [1, 2, 4, 6]
    assert worker.stats()["why_no_graphs"] == ""


@pytest.mark.parametrize("setting", [GREEDY, replace(GREEDY, temperature=0.8, top_p=0.9, seed=1)], ids=["greedy", "drawn"])
def test_a_burst_waits_for_the_device_once(setting: Sampling) -> None:
    """The one wait is the copy of the tokens to the host; any other raises."""
    worker = engine(graphs="on", burst=8, max_batch=1)
    worker.submit(PROMPTS[0], setting)
    for _ in range(3):
        worker.step()  # the prompt, a burst that captures, one that finds everything made
    runner = worker.runner
    waits = 0
    burst = runner.burst

    def watched(*arguments: object) -> list[list[int]]:
        nonlocal waits
        tolist = torch.Tensor.tolist
        with pytest.MonkeyPatch.context() as patch:

            def counted(tensor: torch.Tensor) -> object:
                nonlocal waits
                waits += 1
                torch.cuda.set_sync_debug_mode("default")
                return tolist(tensor)

            patch.setattr(torch.Tensor, "tolist", counted)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return burst(*arguments)  # type: ignore[arg-type]
            finally:
                torch.cuda.set_sync_debug_mode("default")

    runner.burst = watched  # type: ignore[method-assign]
    worker.step()
    assert waits == 1
