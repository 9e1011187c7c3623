"""The GGUF reader: every format against a scalar loop over the published block layout; broken files meet one clear error."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import ModelFileError, RidgelineError, UnknownNameError
from ridgeline.workload.gguf import MOST_ITEMS, Gguf, open_gguf
from ridgeline.workload.gguf_blocks import DEQUANTISE, KINDS
from tests.workload.gguf_files import pair, text, value_bytes, write_gguf

SIZES = {kind.name: kind for kind in KINDS.values()}


def fp16(raw: bytes, at: int) -> float:
    return struct.unpack_from("<e", raw, at)[0]


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def six_bits(raw: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum j of the 12 bytes Q4_K and Q5_K begin with (after two fp16)."""
    q = raw[4:16]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def scalar(kind: str, raw: bytes) -> list[float]:
    """One block, value by value, as the layout says; exact in double."""
    if kind in ("F32", "F64", "F16"):
        return [struct.unpack({"F32": "<f", "F64": "<d", "F16": "<e"}[kind], raw)[0]]
    if kind == "BF16":
        return [struct.unpack("<f", b"\0\0" + raw)[0]]
    if kind == "Q8_0":
        return [fp16(raw, 0) * signed(raw[2 + i]) for i in range(32)]
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        head = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[kind]
        values = []
        for i in range(32):
            code = raw[head + i % 16] >> (4 if i >= 16 else 0) & 15
            if kind[1] == "5":
                code |= (struct.unpack_from("<I", raw, head - 4)[0] >> i & 1) << 4
            base = fp16(raw, 2) if kind.endswith("_1") else -fp16(raw, 0) * (8 if kind[1] == "4" else 16)
            values.append(fp16(raw, 0) * code + base)
        return values
    if kind in ("Q4_K", "Q5_K"):
        values = []
        for i in range(256):
            group, place = i // 32, i % 32
            code = raw[(16 if kind == "Q4_K" else 48) + group // 2 * 32 + place] >> (4 if group % 2 else 0) & 15
            if kind == "Q5_K":
                code |= (raw[16 + place] >> group & 1) << 4
            scale, minimum = six_bits(raw, group)
            values.append(fp16(raw, 0) * scale * code - fp16(raw, 2) * minimum)
        return values
    assert kind == "Q6_K"
    values = []
    for i in range(256):
        part, row, place = i // 128, i % 128 // 32, i % 32
        low = raw[part * 64 + row % 2 * 32 + place] >> (4 if row >= 2 else 0) & 15
        high = raw[128 + part * 32 + place] >> (2 * row) & 3
        values.append(fp16(raw, 208) * signed(raw[192 + i // 16]) * ((low | high << 4) - 32))
    return values


def random_blocks(kind: str, count: int, seed: int) -> bytes:
    """Blocks of random bits whose fp16 (and wider) fields are finite."""
    generator = numpy.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, SIZES[kind].bytes), dtype=numpy.uint8)
    if kind in ("F32", "F64", "F16", "BF16"):
        values = generator.standard_normal(count)
        if kind == "BF16":
            return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        return values.astype({"F32": "<f4", "F64": "<f8", "F16": "<f2"}[kind]).tobytes()
    for at in {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        blocks[:, at : at + 2] = generator.standard_normal((count, 1)).astype("<f2").view(numpy.uint8)
    return blocks.tobytes()


def one_tensor(folder: Path, kind: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Gguf, bytes]:
    raw = random_blocks(kind, int(numpy.prod(shape)) // SIZES[kind].values, seed)
    return open_gguf(write_gguf(folder / f"{kind}.gguf", {}, {"w": (kind, shape, raw)})), raw


@pytest.mark.parametrize("kind", DEQUANTISE)
def test_every_format_equals_a_loop_over_its_layout(kind: str, tmp_path: Path) -> None:
    file, raw = one_tensor(tmp_path, kind, (3, 512))
    size = SIZES[kind].bytes
    expected = torch.tensor([v for at in range(0, len(raw), size) for v in scalar(kind, raw[at : at + size])], dtype=torch.float64)
    got = file.tensor("w")
    assert got.dtype == torch.float32 and got.shape == (3, 512) and len(set(got.flatten().tolist())) > 100
    # One product and one sum in float32: half a unit in the last place of each, of the largest term.
    largest = expected.abs().reshape(-1, SIZES[kind].values).amax(1, keepdim=True).expand(-1, SIZES[kind].values).flatten()
    assert ((got.double().flatten() - expected).abs() <= 4e-7 * largest + 1e-30).all()


def test_a_wrong_nibble_order_would_be_seen(tmp_path: Path) -> None:
    file, raw = one_tensor(tmp_path, "Q4_1", (1, 32))
    swapped = raw[:4] + bytes((byte >> 4 | (byte & 15) << 4) for byte in raw[4:])
    assert not numpy.allclose(file.tensor("w").numpy(), scalar("Q4_1", swapped), atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_raw_blocks_are_the_codes_behind_the_values(kind: str, tmp_path: Path) -> None:
    file, raw = one_tensor(tmp_path, kind, (4, 96))
    codes, scale, minimum = file.raw_blocks("w")
    assert codes.dtype == torch.uint8 and codes.shape == (4, 3, 32) and scale.dtype == torch.float16 and scale.shape == (4, 3)
    steps = codes.view(torch.int8) if kind == "Q8_0" else codes
    values = scale.float()[..., None] * (steps.float() - (8 if kind == "Q4_0" else 0))
    if kind == "Q4_1":
        assert minimum is not None and minimum.shape == (4, 3)
        values = values + minimum.float()[..., None]
    else:
        assert minimum is None
    assert torch.equal(values.reshape(4, 96), file.tensor("w"))
    assert scale[0, 1].item() == fp16(raw, SIZES[kind].bytes)


def test_raw_blocks_of_other_formats_and_unread_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="Q6_K"):
        one_tensor(tmp_path, "Q6_K", (1, 256))[0].raw_blocks("w")
    file = open_gguf(write_gguf(tmp_path / "two.gguf", {}, {"w": ("Q2_K", (1, 256), bytes(84))}))
    with pytest.raises(ModelFileError, match=r"tensor w .*Q2_K[\s\S]*convert"):
        file.tensor("w")
    with pytest.raises(UnknownNameError, match="'v'"):
        file.tensor("v")


def test_metadata_of_every_type_comes_back(tmp_path: Path) -> None:
    stored = {
        "a": ("u8", 255), "b": ("i8", -128), "c": ("u16", 65535), "d": ("i16", -2), "e": ("u32", 2**32 - 1), "f": ("i32", -5),
        "g": ("f32", 0.5), "h": ("bool", True), "i": ("u64", 2**64 - 1), "j": ("i64", -(2**63)), "k": ("f64", 1e-300), "l": ("str", "ĠHé"),
        "m": ("[u32", [1, 2, 3]), "n": ("[str", ["x", "", "日"]), "o": ("[[i8", [[1], [], [-1, 2]]), "p": ("[bool", [True, False]),
    }  # fmt: skip
    for version in (2, 3):
        file = open_gguf(write_gguf(tmp_path / "m.gguf", stored, {}, version=version))
        assert file.metadata == {key: value for key, (_, value) in stored.items()} and file.version == version
        assert all(type(file.metadata[key]) is type(value) for key, (_, value) in stored.items())


def header(tensors: int, pairs: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def row(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)


F32_ROW = row("w", (4,), 0, 0)
DEEP = value_bytes("[[[[[u8", [[[[[1]]]]])
BROKEN = {
    "empty": (b"", "cannot read"),
    "not gguf": (b"\x80\x04pickle", "not a GGUF"),
    "version 1": (header(0, 0, b"", version=1), "versions 2 and 3"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
    "no counts": (b"GGUF\3\0\0\0\0", "tensor count"),
    "too many tensors": (header(2**63, 0, bytes(64)), "cannot fit"),
    "too many pairs": (header(0, 2**40, bytes(64)), "cannot fit"),
    "long key": (header(0, 1, struct.pack("<Q", 2**62) + bytes(32)), "metadata key"),
    "bad type": (header(0, 1, text("k") + struct.pack("<I", 13) + bytes(16)), "k of type 13"),
    "bad text": (header(0, 1, text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe" + bytes(8)), "not UTF-8"),
    "key twice": (header(0, 2, pair("k", "u8", 1) * 2), "twice"),
    "array too long": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(64)), "items"),
    "arrays too deep": (header(0, 1, text("k") + struct.pack("<I", 9) + DEEP), "inside each other"),
    "alignment": (header(0, 1, pair("general.alignment", "u32", 3) + bytes(8)), "power of two"),
    "alignment zero": (header(0, 1, pair("general.alignment", "u32", 0) + bytes(8)), "power of two"),
    "five dimensions": (header(1, 0, row("w", (1,) * 5, 0, 0) + bytes(64)), "5 dimensions"),
    "no dimension": (header(1, 0, row("w", (), 0, 0) + bytes(64)), "0 dimensions"),
    "unknown kind": (header(1, 0, row("w", (4,), 999, 0) + bytes(64)), "kind 999"),
    "zero size": (header(1, 0, row("w", (0, 4), 0, 0) + bytes(64)), "shape"),
    "half a block": (header(1, 0, row("w", (48,), 2, 0) + bytes(64)), "blocks of 32"),
    "huge shape": (header(1, 0, row("w", (2**60, 2**60), 0, 0) + bytes(64)), "truncated"),
    "past the end": (header(1, 0, row("w", (4,), 0, 2**40) + bytes(64)), "truncated"),
    "unaligned": (header(1, 0, row("w", (4,), 0, 4) + bytes(64)), "multiples of 32"),
    "name twice": (header(2, 0, F32_ROW * 2 + bytes(128)), "twice"),
    "overlap": (header(2, 0, row("v", (16,), 0, 0) + row("w", (16,), 0, 32) + bytes(256)), "same bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_meet_a_clear_error(case: str, tmp_path: Path) -> None:
    content, word = BROKEN[case]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"(?s){word}"):
        open_gguf(tmp_path / "x.gguf")


def test_arrays_are_bounded_together(tmp_path: Path) -> None:
    many = text("k") + struct.pack("<IIQ", 9, 0, MOST_ITEMS) + bytes(MOST_ITEMS)
    (tmp_path / "x.gguf").write_bytes(header(0, 2, many + many.replace(b"k", b"l", 1)))
    with pytest.raises(ModelFileError, match=r"l of 4,194,304 items[\s\S]*at most"):
        open_gguf(tmp_path / "x.gguf")


def test_missing_file() -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf"):
        open_gguf("nowhere.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("gguf")
    tensors = {kind: (kind, (2, 256), random_blocks(kind, 512 // SIZES[kind].values, 1)) for kind in ("F32", "Q4_1", "Q8_0", "Q6_K")}
    meta = {"general.alignment": ("u32", 32), "t": ("[str", ["a", "bc"]), "n": ("[f32", [1.0, 2.0]), "s": ("str", "x")}
    path = write_gguf(folder / "whole.gguf", meta, tensors)
    return folder / "mutated.gguf", path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_are_read_or_refused(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = whole
    mutated = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path.write_bytes(mutated[: data.draw(st.one_of(st.just(len(mutated)), st.integers(0, len(mutated))))])
    try:
        file = open_gguf(path)
        total = sum(file.tensor(name).numel() for name in file.tensors if file.tensors[name].kind in DEQUANTISE)
    except RidgelineError:
        return
    assert total <= 8 * len(content), "more numbers than the bytes can hold"


def test_every_truncation_is_refused(whole: tuple[Path, bytes]) -> None:
    path, content = whole
    for length in [*range(0, 420, 7), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            open_gguf(path)


REAL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def real_file() -> Path:
    for folder in os.environ.get("RIDGELINE_DATA", "").split(os.pathsep):
        if folder and (Path(folder) / REAL).is_file():
            return Path(folder) / REAL
    pytest.skip(f"{REAL} is not under RIDGELINE_DATA")


def test_a_real_file() -> None:
    file = open_gguf(real_file())
    assert len(file.tensors) == 272 and file.metadata["llama.block_count"] == 30
    name = "blk.3.attn_q.weight"
    codes, scale, minimum = file.raw_blocks(name)
    assert minimum is not None
    assert torch.equal((scale.float()[..., None] * codes + minimum.float()[..., None]).reshape(576, 576), file.tensor(name))
