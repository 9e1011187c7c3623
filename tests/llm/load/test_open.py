"""load_model: one decoder from every kind of file, equal to transformers'; real models against their published figures."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.core.errors import DataError, ModelFileError, OptionError, UnknownNameError
from ridgeline.llm.cache.kv import KVCache
from ridgeline.llm.load import Loaded, load_model
from ridgeline.llm.load.open import BUILTIN, open_source
from ridgeline.llm.model.config import config_of
from ridgeline.llm.model.decoder import Batch
from ridgeline.workload.data.find import find_file
from ridgeline.workload.gguf import open_gguf
from tests.llm.load import model_files
from tests.llm.load.model_files import (
    HUGGINGFACE,
    VOCAB,
    gguf_metadata,
    spaced_json,
    weights,
    write_folder,
    write_gguf_model,
    write_llama2c,
)
from tests.workload.gguf_files import write_gguf

transformers = pytest.importorskip("transformers")
IDS = [1, 50, 7, 280, 261, 33, 99, 4, 250, 262, 5]


def logits(loaded: Loaded, ids: list[int]) -> Tensor:
    """Float32 logits of a text, in one step through a cache of its own."""
    count, pages = len(ids), -(-len(ids) // 16)
    cache = KVCache(loaded.config, pages, dtype=next(loaded.model.parameters()).dtype)
    places = torch.arange(count)
    table = torch.arange(pages, dtype=torch.int32)[None]
    batch = Batch(torch.tensor(ids), places, places, table, torch.tensor([count], dtype=torch.int32), (0, count), None)
    with torch.inference_mode():
        return loaded.model(batch, cache)


def theirs(data: dict[str, Any], tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Transformers' logits with the same weights."""
    config = transformers.CONFIG_MAPPING[data["model_type"]].from_dict({**data, "attn_implementation": "eager"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    rotary = getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None
    if rotary is not None:  # computed, not stored
        model.model.rotary_emb = type(rotary)(config)
    with torch.inference_mode():
        return model.eval()(torch.tensor([ids])).logits[0]


def close(ours: Tensor, reference: Tensor) -> bool:
    return ours.shape == reference.shape and torch.allclose(ours, reference, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def reference() -> Tensor:
    return theirs(HUGGINGFACE, weights(), IDS)


@pytest.mark.parametrize("kind", ["folder", "sharded folder", "Llama 2 folder", "gguf", "byte-level gguf", "llama2c"])
def test_one_decoder_from_every_file(kind: str, reference: Tensor, tmp_path: Path) -> None:
    if "folder" in kind:
        tokenizer = spaced_json() if "Llama 2" in kind else None
        path = write_folder(tmp_path / "model", weights(), tokenizer=tokenizer, shards=3 if "sharded" in kind else 1)
    elif "gguf" in kind:
        path = write_gguf_model(tmp_path / "model.gguf", weights(), spaced="byte-level" not in kind)
    else:
        path = write_llama2c(tmp_path / "model.bin", weights(), config_of(HUGGINGFACE, "test"))
    loaded = load_model(path, device="cpu")
    assert close(logits(loaded, IDS), reference)
    assert loaded.name == "model" and loaded.config.vocab == VOCAB and loaded.bos == 1 and 2 in loaded.eos
    assert not loaded.model.training and not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.chat_template is None) == (kind == "llama2c")
    assert loaded.eos == {"folder": (2, 4), "byte-level gguf": (2, 4), "gguf": (2,), "llama2c": (2, 1)}.get(kind, (2, 4))


def test_a_wrong_number_would_be_seen(reference: Tensor, tmp_path: Path) -> None:
    planted = weights()
    planted["model.layers.1.self_attn.k_proj.weight"][3] *= 1.01
    assert not close(logits(load_model(write_gguf_model(tmp_path / "m.gguf", planted), device="cpu"), IDS), reference)


def test_rows_are_put_in_our_order(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "m.gguf", weights())
    name, expected = "model.layers.0.self_attn.q_proj.weight", weights()["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(open_source(str(path)).tensors[name], expected)
    assert not torch.equal(open_gguf(path).tensor("blk.0.attn_q.weight"), expected)  # the file has them in pairs


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_families(family: str, form: str, tmp_path: Path) -> None:
    data = HUGGINGFACE | FAMILIES[family]
    tensors = weights(data, seed=1)
    if form == "folder":
        path = write_folder(tmp_path / "model", tensors, data)
    elif family == "mistral":  # its files say llama
        metadata = gguf_metadata(data, "llama") | {"llama.attention.sliding_window": ("u32", 4)}
        whole = write_gguf_model(tmp_path / "plain.gguf", tensors, data)
        path = rewritten(whole, tmp_path / "model.gguf", metadata)
    else:
        path = write_gguf_model(tmp_path / "model.gguf", tensors, data, kind=family)
    loaded = load_model(path, device="cpu")
    assert loaded.config.family == family
    assert close(logits(loaded, IDS), theirs(data, tensors, IDS))


def rewritten(source: Path, target: Path, metadata: dict[str, tuple[str, Any]]) -> Path:
    """The tensors of one GGUF file with other metadata."""
    file = open_gguf(source)
    return write_gguf(
        target, metadata, {n: ("F32", e.shape, file.data[e.start : e.start + e.size].tobytes()) for n, e in file.tensors.items()}
    )


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_gpt2(form: str, tmp_path: Path) -> None:
    data: dict[str, Any] = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    tensors = {f"transformer.{name}": tensor for name, tensor in weights(data).items()}
    if form == "folder":
        path = write_folder(tmp_path / "model", {n.removeprefix("transformer."): t for n, t in tensors.items()}, data)
    else:
        path = write_gpt2(tmp_path / "model.gguf", tensors)
    loaded = load_model(path, device="cpu", context=20)
    assert loaded.config.context == 20
    assert close(logits(loaded, IDS), theirs(data, tensors, IDS))


def write_gpt2(path: Path, tensors: dict[str, Tensor]) -> Path:
    names = {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
             "transformer.h.": "blk.",
             "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
             "mlp.c_proj": "ffn_down"}  # fmt: skip
    entries = {}
    for name, tensor in tensors.items():
        turned = tensor.t() if ".c_" in name and tensor.dim() == 2 else tensor
        for ours, other in names.items():
            name = name.replace(ours, other)
        entries[name] = ("F32", tuple(turned.shape), turned.contiguous().numpy().tobytes())
    metadata = {key: value for key, value in gguf_metadata(HUGGINGFACE, spaced=False).items() if not key.startswith("llama.")}
    metadata |= {
        "general.architecture": ("str", "gpt2"), "gpt2.block_count": ("u32", 2), "gpt2.context_length": ("u32", 64),
        "gpt2.embedding_length": ("u32", 32), "gpt2.feed_forward_length": ("u32", 128), "gpt2.attention.head_count": ("u32", 4),
        "gpt2.attention.layer_norm_epsilon": ("f32", 1e-5),
    }  # fmt: skip
    return write_gguf(path, metadata, entries)


def test_options(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "model", weights())
    narrow = load_model(path, dtype="bfloat16", device="cpu", context=16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in narrow.model.parameters()) and narrow.config.context == 16
    for options, word in (
        ({"dtype": "int3"}, "dtype"), ({"device": "nowhere"}, "device"), ({"device": "meta"}, "device"), ({"weights": "int2"}, "weights"),
        ({"context": 65}, "context"), ({"context": 0}, "context"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=word):
            load_model(path, **options)
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="cuda"):
            load_model(path, device="cuda")


def test_quantised_weights_are_smaller_and_near(tmp_path: Path) -> None:
    data = HUGGINGFACE | {"hidden_size": 64, "intermediate_size": 128}
    path = write_folder(tmp_path / "model", weights(data), data)
    dense, packed = load_model(path, dtype="bfloat16", device="cpu"), load_model(path, dtype="bfloat16", device="cpu", weights="int8")
    expected, found = (logits(loaded, IDS).float() for loaded in (dense, packed))
    assert functional.cosine_similarity(expected, found).min() > 0.98


def test_random_shapes_are_finite_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.llm.model import config
    from ridgeline.workload.models.decoder import DecoderConfig

    small = DecoderConfig(24, 64, 96, 4, 2, 500, 1e4)
    monkeypatch.setitem(config.CONFIGS, "small", small)
    monkeypatch.setitem(config.CONTEXTS, "small", 128)
    one, two = (load_model("small:random", device="cpu", dtype="bfloat16") for _ in range(2))
    found = logits(one, [5, 6, 7, 8])
    assert torch.isfinite(found).all() and 0.1 < found.float().std() < 10
    assert torch.equal(found, logits(two, [5, 6, 7, 8])) and one.eos == () and one.tokenizer.encode("hé") == [104, 195, 169]
    with pytest.raises(UnknownNameError, match="llama"):
        load_model("lama-3-8b:random")


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIDGELINE_DATA", raising=False)
    with pytest.raises(ModelFileError, match="no model nothing"):
        load_model("nothing")
    with pytest.raises(DataError, match="was not found"):
        load_model("smollm2-135m")
    with pytest.raises(ModelFileError, match=r"holds no config.json"):
        load_model(tmp_path)
    path = write_llama2c(tmp_path / "model.bin", weights(), config_of(HUGGINGFACE, "test"))
    (tmp_path / f"tok{VOCAB}.bin").unlink()
    with pytest.raises(ModelFileError, match="no vocabulary"):
        load_model(path)
    whole = write_folder(tmp_path / "folder", weights())
    (whole / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_model(whole)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"rope.scaling.factor": ("f32", 4.0)}, 4.0),  # llama.cpp takes a factor without a type as linear
        ({"rope.scale_linear": ("f32", 4.0)}, 4.0),  # as files said it at first
        ({"rope.scaling.type": ("str", "linear"), "rope.scaling.factor": ("f32", 2.0)}, 2.0),
        ({"rope.scaling.type": ("str", "none"), "rope.scaling.factor": ("f32", 4.0)}, None),
        ({"rope.scale_linear": ("f32", 1.0)}, None),
        ({"attention.causal": ("bool", True), "rope.scaling.attn_factor": ("f32", 1.0), "attention.scale": ("f32", 0.0)}, None),
        ({"attention.causal": ("bool", False)}, "attention.causal"),
        ({"attention.scale": ("f32", 0.5)}, "attention.scale"),
        ({"rope.scaling.attn_factor": ("f32", 2.0)}, "attn_factor"),
    ],
)
def test_gguf_keys_are_followed_or_refused(
    said: dict[str, tuple[str, object]], expected: float | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = model_files.gguf_metadata
    more = {f"llama.{key}": value for key, value in said.items()}
    monkeypatch.setattr(model_files, "gguf_metadata", lambda *given: {**usual(*given), **more})
    path = write_gguf_model(tmp_path / "model.gguf", weights())
    if isinstance(expected, str):
        assert expected in refused(path)
        return
    found = load_model(path, device="cpu").config.rope_scaling
    assert (found is None) == (expected is None) and (found is None or (found.kind, found.factor) == ("linear", expected))


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_model(path, device="cpu")
    return str(caught.value)


def test_files_that_say_more_than_they_hold(tmp_path: Path) -> None:
    config = config_of(HUGGINGFACE, "test")
    path = write_llama2c(tmp_path / "model.bin", weights(), config)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    assert "bytes" in refused(path)
    path.write_bytes(struct.pack("<7i", 2**16, 2**18, 1000, 64, 64, 2**20, 64) + whole[28:])
    assert "a model of these sizes takes" in refused(path)
    path.write_bytes(struct.pack("<I", 0x616B3432) + whole[4:])
    assert "newer llama2.c format" in refused(path)
    folder = write_folder(tmp_path / "model", weights(), HUGGINGFACE | {"num_hidden_layers": 900})
    assert "no weights of layer 899" in refused(folder)
    (folder / "config.json").write_text(json.dumps(HUGGINGFACE | {"vocab_size": 2**20}))
    assert "the config says [1048576, 32]" in refused(folder)
    (folder / "config.json").write_text(json.dumps(HUGGINGFACE | {"vocab_size": 100}))
    assert "vocabulary" in refused(folder)
    (folder / "config.json").write_text(json.dumps(HUGGINGFACE | {"auto_map": {"AutoModel": "code.py"}}))
    assert "auto_map" in refused(folder)


def test_weights_that_are_no_plain_floats(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for tensor, word in ((weights()[name].to(torch.float8_e4m3fn), "plain floats"), (weights()[name] * float("inf"), "finite")):
        assert word in refused(write_folder(tmp_path / "model", weights() | {name: tensor}))
    large = write_folder(tmp_path / "large", weights() | {name: weights()[name] * 1e6})
    assert torch.isfinite(load_model(large, device="cpu", dtype="bfloat16").model.layers[0].perceptron.up.weight).all()
    with pytest.raises(ModelFileError, match=r"infinity there"):
        load_model(large, device="cpu", dtype="float16")
    folder = write_folder(tmp_path / "two", weights(), shards=2)
    shutil.copy(folder / "model-0.safetensors", folder / "model-1.safetensors")
    assert "another file" in refused(folder)


@pytest.mark.skipif(not (BUILTIN / "model.safetensors").is_file(), reason="the package's own model is not built")
def test_the_builtin_model() -> None:
    loaded = load_model("builtin", device="cpu")
    ids = loaded.tokenizer.encode("First Citizen:\nSpeak, speak.")
    assert loaded.name == "builtin" and loaded.tokenizer.decode(ids) == "First Citizen:\nSpeak, speak."
    assert torch.isfinite(logits(loaded, ids)).all()


def real(name: str) -> Loaded:
    try:
        return load_model(name, device="cpu", dtype="float32")
    except DataError:
        pytest.skip(f"needs {name} under RIDGELINE_DATA")


def test_stories260k_predicts_its_sample() -> None:
    """1.266 nats a token over the stories, each by itself after a begin-of-text token, without the white space around it."""
    loaded = real("stories260k")
    text = find_file("text/tinystories_sample.txt", "tinystories_sample.txt", get="a sample of TinyStories").read_text(encoding="utf-8")
    total, count = 0.0, 0
    for story in text.split("<|endoftext|>"):
        if ids := loaded.tokenizer.encode(story.strip(), add_bos=True)[1:]:
            total += functional.cross_entropy(logits(loaded, [1, *ids[:-1]]), torch.tensor(ids), reduction="sum").item()
            count += len(ids)
    assert count == 1804 and round(total / count, 3) == 1.266


@pytest.mark.skipif(os.environ.get("RIDGELINE_FULL") != "1", reason="takes half a minute")
def test_smollm2_is_transformers() -> None:
    loaded = real("smollm2-135m")
    source = open_source("smollm2-135m")
    ids = loaded.tokenizer.encode("The capital of France is")
    found = logits(loaded, ids)
    data = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    expected = theirs(data, dict(source.tensors), ids)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4), (found - expected).abs().max()
    assert loaded.tokenizer.decode([int(found[-1].argmax())]) == " Paris"
