"""Launching again what was launched before: the short way must tell apart all that Triton compiles for."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.kernel import jit


class Kernel:
    """Looks like a @jit kernel of (x, n, scale, BLOCK, FLAG=3) to `launch`; `seen` has what ran, the long way or the short one."""

    def __init__(self) -> None:
        names = {"x": False, "n": False, "scale": False, "BLOCK": True, "FLAG": True}
        self.params = [SimpleNamespace(name=name, is_constexpr=fixed, default=3) for name, fixed in names.items()]
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: Any, **constants: Any) -> Any:
            self.seen.append(("long", grid, args, constants))
            return SimpleNamespace(run=lambda *values: self.seen.append(("short", *values)), function="function", packed_metadata="meta")

        return first


class Descriptor:
    """Stands for a tensor descriptor."""

    def __init__(self, dtype: torch.dtype, *block_shape: int) -> None:
        self.base, self.block_shape = torch.zeros(64, dtype=dtype), list(block_shape)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(jit, "_ready", {})
    monkeypatch.setattr(jit, "_prompt", {})
    monkeypatch.setattr(jit, "HAVE_TRITON", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77 + device, raising=False)
    return Kernel()


def ways(kernel: Kernel) -> list[str]:
    return [seen[0] for seen in kernel.seen]


def test_the_second_launch_takes_the_short_way_with_every_argument(kernel: Kernel) -> None:
    x = torch.zeros(64)
    for n in (33, 35):
        jit.launch(kernel, (5, 2), x, n, 0.5, BLOCK=128, num_warps=4)
    assert kernel.seen[0] == ("long", (5, 2), (x, 33, 0.5), {"BLOCK": 128, "num_warps": 4})
    assert kernel.seen[1] == ("short", 5, 2, 1, 77, "function", "meta", None, None, None, x.data_ptr(), 35, 0.5, 128, 3)


@pytest.mark.parametrize(
    "args, constants",
    [
        ((torch.zeros(65)[1:], 33, 0.5), {"BLOCK": 128}),  # not aligned to 16 bytes
        ((torch.zeros(64, dtype=torch.float64), 33, 0.5), {"BLOCK": 128}),
        ((None, 33, 0.5), {"BLOCK": 128}),
        ((torch.zeros(64), 1, 0.5), {"BLOCK": 128}),
        ((torch.zeros(64), True, 0.5), {"BLOCK": 128}),
        ((torch.zeros(64), 48, 0.5), {"BLOCK": 128}),
        ((torch.zeros(64), 2**31 + 1, 0.5), {"BLOCK": 128}),
        ((torch.zeros(64), 33, 2), {"BLOCK": 128}),
        ((torch.zeros(64), 33, 0.5), {"BLOCK": 256}),
        ((torch.zeros(64), 33, 0.5), {"BLOCK": 128, "FLAG": 4}),
        ((torch.zeros(64), 33, 0.5), {"BLOCK": 128, "num_warps": 8}),
    ],
)
def test_another_kind_is_compiled_anew(kernel: Kernel, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    jit.launch(kernel, (1,), torch.zeros(64), 33, 0.5, BLOCK=128)
    jit.launch(kernel, (1,), *args, **constants)
    assert ways(kernel) == ["long", "long"]
    jit.launch(kernel, (1,), *args, **constants)
    assert ways(kernel)[2] == "short"


def test_each_device_has_a_kernel_and_a_stream_of_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    for device in (0, 1, 1, 0):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device, raising=False)
        jit.launch(kernel, (1,), x, 33, 0.5, BLOCK=128)
    assert ways(kernel) == ["long", "long", "short", "short"]
    assert [seen[4] for seen in kernel.seen[2:]] == [78, 77]


def test_descriptors_of_other_blocks_or_dtypes_are_another_kind(kernel: Kernel) -> None:
    kinds = [(torch.float32, 16, 64), (torch.float32, 64, 16), (torch.float16, 16, 64), (torch.float32, 16, 64)]
    for kind in kinds:
        jit.launch(kernel, (1,), Descriptor(*kind), 33, 0.5, BLOCK=128)
    assert ways(kernel) == ["long", "long", "long", "short"]


class Launcher:
    """Looks like Triton 3.6's: `launch` is the C function, or wrapped in what encodes descriptors."""

    def __init__(self, tensordesc_meta: list[Any], tensordesc_indices: set[int], scratch: int = 0) -> None:
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.seen: list[tuple[Any, ...]] = []

        def launcher(*values: Any) -> None:
            self.seen.append(values)

        def inner(*values: Any) -> None:
            assert len(tensordesc_indices) == len(tensordesc_meta)
            launcher("encoded anew", *values)

        self.launch = inner if tensordesc_meta else launcher

    def __call__(self, *values: Any) -> None:
        self.seen.append(("by Triton", *values))


def started(launcher: Launcher, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(jit, "_KNOWN_LAUNCHER", True)
    ready = jit.Ready(SimpleNamespace(run=launcher, function="function", packed_metadata="meta"), (128,))
    for _ in range(2):
        ready((5, 2), 77, values)
    return launcher.seen


HEAD = (5, 2, 1, 77, "function")


def test_a_known_launcher_is_called_without_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = started(Launcher([], set()), (1000, 35), monkeypatch)
    assert seen == [(*HEAD, False, True, None, None, "meta", None, None, None, 1000, 35, 128)] * 2


def test_a_kernel_with_scratch_memory_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        started(Launcher([], set(), scratch=64), (1000, 35), monkeypatch)
        == [("by Triton", *HEAD, "meta", None, None, None, 1000, 35, 128)] * 2
    )


def test_descriptors_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.backends.nvidia import driver

    encoded: list[Any] = []

    def encode(at: Any, how: Any) -> list[Any]:
        encoded.append((at, how))
        return [f"map {how}", 7]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    one, other = Descriptor(torch.float16, 16, 64), Descriptor(torch.float16, 64, 16)
    seen = started(Launcher(["a", "b"], {0, 1}), (one, other, 1000), monkeypatch)
    assert encoded == [(one, "a"), (other, "b")]
    assert [values[13:] for values in seen] == [("map a", 7, "map b", 7, 1000, 128)] * 2
    started(Launcher(["b"], {0}), (one, 1000), monkeypatch)  # for another kernel, anew
    assert encoded[2:] == [(one, "b")]
    assert started(Launcher(["a"], {1}), (1000, one), monkeypatch)[0][0] == "encoded anew"


@pytest.mark.parametrize("given, generation, prompt", [({}, 9, True), ({}, 10, True), ({}, 8, False), ({"PROMPT": False}, 9, False)])
def test_a_kernel_that_knows_how_is_started_promptly(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any],
                                                     generation: int, prompt: bool) -> None:  # fmt: skip
    kernel.params.append(SimpleNamespace(name="PROMPT", is_constexpr=True, default=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    for _ in range(2):
        jit.launch(kernel, (1,), torch.zeros(64), 33, 0.5, BLOCK=128, **given)
    assert ways(kernel) == ["long", "short"]
    assert kernel.seen[0][3] == {"BLOCK": 128, **given, **({"PROMPT": True, "launch_pdl": True} if prompt else {})}
    assert kernel.seen[1][-1] is prompt


def test_one_that_does_not_is_not(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    jit.launch(kernel, (1,), torch.zeros(64), 33, 0.5, BLOCK=128)
    assert kernel.seen[0][3] == {"BLOCK": 128}


def test_every_prompt_kernel_waits_before_anything_else() -> None:
    """Its first statement is promptly(PROMPT); those that may read before the wait begin there, and wait later."""
    found = {}
    for path in Path(jit.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "PROMPT" in [one.arg for one in node.args.args] and path.stem != "overlap":
                body = node.body[1:] if ast.get_docstring(node) else node.body
                found[node.name] = ast.unparse(body[0]), ast.unparse(node).count("wait(PROMPT)")
    assert len(found) > 30
    late = {name for name, (first, _) in found.items() if first != "promptly(PROMPT)"}
    assert late == {"gemv_kernel", "gemv_nibbles_kernel", "decode_attention_kernel", "decode_attention_head_kernel"}
    assert all(found[name][0] == "begin(PROMPT)" and found[name][1] >= 1 for name in late)


def test_constants_given_by_position_count(kernel: Kernel) -> None:
    for block in (128, 256, 128):
        jit.launch(kernel, (1,), torch.zeros(64), 33, 0.5, block)
    assert ways(kernel) == ["long", "long", "short"] and kernel.seen[2][-2:] == (128, 3)


def test_an_argument_of_another_sort_goes_the_long_way(kernel: Kernel) -> None:
    for _ in range(2):
        jit.launch(kernel, (1,), object(), 33, 0.5, BLOCK=128)
    assert ways(kernel) == ["long", "long"]


def test_an_empty_grid_starts_nothing(kernel: Kernel) -> None:
    jit.launch(kernel, (3, 0), torch.zeros(64), 33, 0.5, BLOCK=128)
    assert kernel.seen == []


def test_every_kernel_file_loads_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from ridgeline.kernel.use import load_operators\nload_operators()\n"
        "import torch\nfrom ridgeline.kernel.softmax import softmax\n"
        "print(float(softmax(torch.zeros(2, 4), -1).sum()))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "2.0", done.stderr[-2000:]
