"""Named data: the right rows in the right places, images moved as a loop would move them, text counted to the byte, bad files refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import DataError, MissingExtraError, OptionError, UnknownNameError
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.data import data_names, load_data
from ridgeline.workload.data.augment import Normalise, RandomCropFlip
from ridgeline.workload.data.digits import split_rows
from ridgeline.workload.data.find import find_file, read_array
from ridgeline.workload.data.text import windows
from ridgeline.workload.models import build_named
from ridgeline.workload.tokenizer import byte_of_letter, load_tokenizer
from tests.workload.gguf_files import write_gguf


def test_importing_does_not_import_torch() -> None:
    code = "import sys, ridgeline.workload.data as d; assert d.data_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0


def test_names_and_misses(tmp_path: Path) -> None:
    assert data_names() == ["digits", "cifar10", "wikitext2"]
    with pytest.raises(UnknownNameError, match="cifar10"):
        load_data("cifar")
    with pytest.raises(DataError, match="no folder"):
        load_data(f"{tmp_path}/nothing")


def test_files_are_searched_in_order_and_misses_name_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        (folder / "text").mkdir(parents=True)
    monkeypatch.setenv("RIDGELINE_DATA", f"{first}{os.pathsep}{os.pathsep}{second}")
    (second / "x.txt").write_text("2")
    assert find_file("x.txt", "text/x.txt", get="write it") == second / "x.txt"
    (first / "text" / "x.txt").write_text("1")
    assert find_file("x.txt", "text/x.txt", get="write it") == first / "text" / "x.txt"
    with pytest.raises(DataError, match=rf"y\.txt[\s\S]*{first}, {second}[\s\S]*write it"):
        find_file("y.txt", get="write it")
    for name in ("cifar10", "wikitext2"):
        with pytest.raises(DataError, match=rf"{first}, {second}[\s\S]*RIDGELINE_DATA"):
            load_data(name)
    monkeypatch.delenv("RIDGELINE_DATA")
    with pytest.raises(DataError, match="is not set"):
        load_data("cifar10")


def test_digits_are_all_there_split_by_class_the_same_each_time() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    data, again, other = load_data("digits"), load_data("digits"), load_data("digits", seed=1)
    images = torch.cat((data.train.inputs, data.test.inputs))
    assert (data.kind, data.classes, len(data.train), len(data.test)) == ("image", 10, 1438, 359)
    assert images.dtype == torch.uint8 and images.shape == (1797, 1, 8, 8) and int(images.max()) == 16
    pixels, labels = sklearn.load_digits(return_X_y=True)

    def key(x: object, y: object) -> list[tuple[int, ...]]:
        rows = numpy.asarray(x).reshape(-1, 64).astype(int).tolist()
        return sorted((*row, int(label)) for row, label in zip(rows, numpy.asarray(y), strict=True))

    assert key(pixels, labels) == key(images, torch.cat((data.train.targets, data.test.targets))), "each image keeps its label"
    assert torch.equal(data.test.inputs, again.test.inputs) and not torch.equal(data.test.inputs, other.test.inputs)
    for label in range(10):
        whole = int((torch.cat((data.train.targets, data.test.targets)) == label).sum())
        assert int((data.test.targets == label).sum()) == round(0.2 * whole)
    values = data.prepare(images)
    assert values.dtype == torch.float32 and abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    with pytest.raises(OptionError, match="test_share"):
        load_data("digits", test_share=1.5)


@given(labels=st.lists(st.integers(0, 3), min_size=8, max_size=60), share=st.floats(0.05, 0.95), seed=st.integers(0, 2**31))
def test_split_keeps_every_row_once(labels: list[int], share: float, seed: int) -> None:
    targets = torch.tensor(labels * 2)  # every class twice at least
    train, test = split_rows(targets, share, seed)
    assert sorted(torch.cat((train, test)).tolist()) == list(range(len(targets)))
    assert set(targets[train].tolist()) == set(targets[test].tolist()) == set(labels)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"ridgeline\[train\]"):
        load_data("digits")


def test_digits_cnn_learns_in_seconds() -> None:
    pytest.importorskip("sklearn")
    data = load_data("digits")
    torch.manual_seed(0)
    model = build_named("digits-cnn", CaseOptions(device="cpu")).module.requires_grad_(True).train()
    epochs, batch = 8, 64
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = epochs * (len(data.train) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(data.train))
        for rows in order[: len(order) // batch * batch].split(batch):
            loss = torch.nn.functional.cross_entropy(model(data.prepare(data.train.inputs[rows])), data.train.targets[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    with torch.no_grad():
        found = model.eval()(data.prepare(data.test.inputs)).argmax(1)
    assert (found == data.test.targets).float().mean() >= 0.97


@given(st.integers(0, 2**32 - 1))
def test_normalise_is_the_formula(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (2, 3, 4, 5), generator=generator, dtype=torch.uint8)
    normalise = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (normalise.mean, normalise.std))
    torch.testing.assert_close(normalise(images).double(), (images.double() / 255 - mean) / std, rtol=1e-6, atol=1e-6)


def moved(image: numpy.ndarray, top: int, left: int, mirrored: bool, padding: int) -> numpy.ndarray:
    """One image, pixel by pixel: pad with zeros, cut, mirror."""
    _, height, width = image.shape
    out = numpy.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row + top - padding, (width - 1 - column if mirrored else column) + left - padding
            if 0 <= y < height and 0 <= x < width:
                out[:, row, column] = image[:, y, x]
    return out


def test_crop_and_flip_are_one_of_the_moves_a_loop_makes() -> None:
    images = torch.randint(1, 256, (64, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    augment = RandomCropFlip(padding=2)
    out = augment(images, torch.Generator().manual_seed(1))
    assert out.dtype == torch.uint8 and out.shape == images.shape
    seen = set()
    for before, after in zip(images.numpy(), out.numpy(), strict=True):
        fits = [move for move in product(range(5), range(5), (False, True)) if (moved(before, *move, 2) == after).all()]
        assert len(fits) == 1
        seen |= set(fits)
    assert len(seen) > 30 and {t for t, _, _ in seen} == {c for _, c, _ in seen} == set(range(5)) and len({m for _, _, m in seen}) == 2
    assert torch.equal(out, augment(images, torch.Generator().manual_seed(1)))
    assert not torch.equal(out, augment(images, torch.Generator().manual_seed(2)))
    kept = RandomCropFlip(padding=0, flip=False)(images, torch.Generator().manual_seed(3))
    assert torch.equal(kept, images)


def write_cifar(folder: Path, train: int = 7, test: int = 5) -> dict[str, numpy.ndarray]:
    generator = numpy.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        arrays[f"{part}_x"] = generator.integers(0, 256, (count, 32, 32, 3), dtype=numpy.uint8)
        arrays[f"{part}_y"] = generator.integers(0, 10, count).astype(numpy.uint8)
    for name, array in arrays.items():
        numpy.save(folder / f"cifar10_{name}.npy", array)
    return arrays


def test_cifar_rows_channels_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_cifar(tmp_path)
    monkeypatch.setenv("RIDGELINE_DATA", str(tmp_path))
    for data in (load_data("cifar10"), load_data("cifar10", folder=tmp_path)):
        assert (data.kind, data.classes, data.augment is not None) == ("image", 10, True)
        for part, split in (("train", data.train), ("test", data.test)):
            assert split.inputs.dtype == torch.uint8 and split.targets.dtype == torch.int64 and split.inputs.is_contiguous()
            assert (split.inputs.permute(0, 2, 3, 1).numpy() == arrays[f"{part}_x"]).all()
            assert (split.targets.numpy() == arrays[f"{part}_y"]).all()


def fake_header(shape: str, dtype: str = "'|u1'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


HOSTILE = {
    "pickled": ("x", lambda p: numpy.save(p, numpy.array([{"a": 1}], dtype=object), allow_pickle=True), "pickled"),
    "bare pickle": ("x", lambda p: p.write_bytes(pickle.dumps([1])), "cannot read"),
    "zip": ("x", lambda p: p.write_bytes(b"PK\x03\x04" + bytes(64)), "cannot read"),
    "empty": ("x", lambda p: p.write_bytes(b""), "cannot read"),
    "huge": ("x", lambda p: p.write_bytes(fake_header(f"({2**40}, 32, 32, 3)") + bytes(64)), "cannot read"),
    "overflowing": ("x", lambda p: p.write_bytes(fake_header(f"({2**70}, 32, 32, 3)") + bytes(64)), "cannot read"),
    "negative": ("x", lambda p: p.write_bytes(fake_header("(-1, 32, 32, 3)") + bytes(64)), "."),
    "code in the header": ("x", lambda p: p.write_bytes(fake_header("__import__('os').getcwd()") + bytes(64)), "cannot read"),
    "truncated": ("x", lambda p: p.write_bytes(p.read_bytes()[:-1]), "cannot read"),
    "no rows": ("x", lambda p: numpy.save(p, numpy.zeros((0, 32, 32, 3), numpy.uint8)), "."),
    "floats": ("x", lambda p: numpy.save(p, numpy.zeros((7, 32, 32, 3), numpy.float32)), r"float32 \[7, 32, 32, 3\]"),
    "channels first": ("x", lambda p: numpy.save(p, numpy.zeros((7, 3, 32, 32), numpy.uint8)), r"uint8 \[N,32,32,3\] is wanted"),
    "float labels": ("y", lambda p: numpy.save(p, numpy.zeros(7)), "float64"),
    "one label over": ("y", lambda p: numpy.save(p, numpy.full(7, 10, numpy.uint8)), "label 10"),
    "negative label": ("y", lambda p: numpy.save(p, numpy.full(7, -1, numpy.int64)), "label -1"),
    "too few labels": ("y", lambda p: numpy.save(p, numpy.zeros(6, numpy.uint8)), "6 labels"),
    "big-endian labels": ("y", lambda p: numpy.save(p, numpy.zeros(7, ">i4")), ">i4"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_arrays_are_refused(case: str, tmp_path: Path) -> None:
    write_cifar(tmp_path)
    letter, spoil, word = HOSTILE[case]
    spoil(tmp_path / f"cifar10_train_{letter}.npy")
    with pytest.raises(DataError, match=word):
        load_data("cifar10", folder=tmp_path)


@given(places=st.lists(st.tuples(st.integers(0, 127), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_headers_are_read_or_refused(places: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.npy"
    numpy.save(path, numpy.zeros((4, 3), numpy.uint8))
    content = bytearray(path.read_bytes())
    for place, value in places:
        content[place] = value
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        assert read_array(path, dtypes=("uint8",), shape=(None, 3)).nbytes <= len(content)


def test_a_folder_of_images(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(1)
    train, test = (generator.integers(0, 256, (n, 2, 9, 8), dtype=numpy.uint8) for n in (12, 4))
    train[:, 1] = 7  # a constant channel
    for name, array in (("train_x", train), ("test_x", test), ("train_y", numpy.arange(12) % 3), ("test_y", numpy.arange(4) % 3)):
        numpy.save(tmp_path / f"{name}.npy", array)
    data = load_data(str(tmp_path), augment=True)
    assert (data.name, data.kind, data.classes, data.augment is not None) == (tmp_path.name, "image", 3, True)
    assert (data.train.inputs.numpy() == train).all() and (data.test.inputs.numpy() == test).all()
    values = data.prepare(data.train.inputs)
    assert abs(values[:, 0].mean()) < 1e-5 and abs(values[:, 0].std(correction=0) - 1) < 1e-5 and values[:, 1].abs().max() < 1e-5
    assert load_data(str(tmp_path)).augment is None
    with pytest.raises(OptionError, match="context"):
        load_data(str(tmp_path), context=8)
    numpy.save(tmp_path / "test_y.npy", numpy.full(4, 3))
    with pytest.raises(DataError, match="label 3"):
        load_data(str(tmp_path))
    numpy.save(tmp_path / "train_x.npy", numpy.zeros((12, 9, 8, 3), numpy.uint8))
    with pytest.raises(DataError, match="channels come second"):
        load_data(str(tmp_path))
    (tmp_path / "test_x.npy").unlink()
    with pytest.raises(DataError, match=r"test_x\.npy"):
        load_data(str(tmp_path))


def test_a_folder_of_text_is_bytes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data"):
        load_data(str(tmp_path))
    text = "naïve\r\n" * 10
    for part in ("train", "test"):
        (tmp_path / f"{part}.txt").write_bytes(text.encode())
    data = load_data(str(tmp_path), context=16)
    raw = list(text.encode())
    assert (data.kind, data.classes, data.test.text_bytes) == ("tokens", 256, (len(raw) - 1) // 16 * 16)
    assert data.test.inputs.flatten().tolist() == raw[: data.test.inputs.numel()], "line ends are the file's own"
    assert data.test.targets.flatten().tolist() == raw[1 : data.test.inputs.numel() + 1]
    for options, word in (({"context": 0}, "context 0"), ({"augment": True}, "augment"), ({"context": 100}, "80 tokens")):
        with pytest.raises((OptionError, DataError), match=word):
            load_data(str(tmp_path), **options)
    (tmp_path / "test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"test\.txt"):
        load_data(str(tmp_path), context=4)
    (tmp_path / "test.txt").write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        load_data(str(tmp_path), context=4)


@given(count=st.integers(2, 200), context=st.integers(1, 40))
def test_windows_predict_each_token_from_those_before_it(count: int, context: int) -> None:
    ids = torch.arange(count)
    if count - 1 < context:
        with pytest.raises(DataError, match=f"{count} tokens"):
            windows(ids, context, Path("x"), None)
        return
    split = windows(ids, context, Path("x"), None)
    assert torch.equal(split.targets, split.inputs + 1) and split.inputs.shape == ((count - 1) // context, context)
    assert split.text_bytes == split.targets.numel() and split.inputs[0, 0] == 0


def small_vocabulary(path: Path) -> Path:
    tokens = ["<s>", *byte_of_letter(), "ab", "abab"]
    metadata = {"model": ("str", "gpt2"), "pre": ("str", "gpt-2"), "tokens": ("[str", tokens), "merges": ("[str", ["a b", "ab ab"]),
                "token_type": ("[i32", [3] + [1] * (len(tokens) - 1)), "bos_token_id": ("u32", 0)}  # fmt: skip
    return write_gguf(path, {f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, {})


def test_wikitext_through_a_tokenizer_counts_bytes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("RIDGELINE_DATA", str(tmp_path))
    (tmp_path / "text").mkdir()
    text = "abababababab é abc\n" * 20
    (tmp_path / "text" / "wikitext2_raw_test.txt").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "wikitext2_valid.txt").write_text(text, encoding="utf-8", newline="")
    path = small_vocabulary(tmp_path / "v.gguf")
    for bos in (False, True):
        data = load_data("wikitext2", tokenizer=path, context=10, bos=bos)
        coder = load_tokenizer(path)
        ids = coder.encode(text)
        targets = data.test.targets.flatten().tolist()
        assert targets == (ids[: len(targets)] if bos else ids[1 : len(targets) + 1])
        assert len(ids) - len(targets) <= 10 and data.classes == coder.size
        assert data.test.text_bytes == len(b"".join(coder.pieces[i] for i in targets)) > len(targets)
        if bos:
            assert (data.test.inputs[:, 0] == 0).all() and torch.equal(data.test.inputs[:, 1:], data.test.targets[:, :-1])
        else:
            assert torch.equal(data.test.inputs[:, 1:], data.test.targets[:, :-1])
    with pytest.raises(OptionError, match="bos"):
        load_data("wikitext2", bos=True)
