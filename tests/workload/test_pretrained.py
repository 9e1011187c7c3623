"""Trained weights from files: the same outputs as the model they were written from, each broken file refused by the tensor's name."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from ridgeline.core.errors import DataError, ModelFileError, OptionError, RidgelineError
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.data import load_data
from ridgeline.workload.data.find import find_file
from ridgeline.workload.data.text import read_text
from ridgeline.workload.models import build_named
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig
from ridgeline.workload.pretrained import PUBLISHED, half_split, load_pretrained
from ridgeline.workload.tokenizer import load_tokenizer
from tests.workload.gguf_files import CONFIG, decoder_metadata, interleaved, write_decoder, write_gguf

QWEN = replace(CONFIG, norm_eps=1e-6, qkv_bias=True, tied=True)
IDS = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(3))


def shaken(config: DecoderConfig) -> CausalLM:
    """Weights large enough that a swapped row shows in the output."""
    model, generator = CausalLM(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.7, generator=generator)
    return model


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, torch.arange(IDS.size(1)))


@pytest.mark.parametrize(("kind", "config"), [("llama", CONFIG), ("llama", replace(CONFIG, tied=True)), ("qwen2", QWEN)])
def test_gguf_gives_back_the_model_it_was_written_from(kind: str, config: DecoderConfig, tmp_path: Path) -> None:
    model = shaken(config)
    loaded = load_pretrained(write_decoder(tmp_path / "m.gguf", model, config, kind))
    assert not loaded.training and torch.equal(outputs(loaded), outputs(model))
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == dict.fromkeys(dict(model.named_parameters()), True)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is config.tied
    with torch.no_grad():
        assert torch.equal(loaded(IDS), outputs(model)), "positions count from 0 where none are given"


def test_rows_left_interleaved_would_be_seen(tmp_path: Path) -> None:
    model = shaken(CONFIG)
    path = write_decoder(tmp_path / "m.gguf", model, CONFIG, "qwen2")  # rows as they are
    swapped = path.read_bytes().replace(b"qwen2", b"llama")  # now read as Llama's
    path.write_bytes(swapped)
    assert not torch.allclose(outputs(load_pretrained(path)), outputs(model), atol=0.1)


@given(heads=st.integers(1, 5), half=st.integers(1, 8))
def test_half_split_undoes_the_converters_order(heads: int, half: int) -> None:
    rows = torch.arange(heads * 2 * half * 3).reshape(-1, 3)
    assert torch.equal(half_split(interleaved(rows, 2 * half), 2 * half), rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_keep_rotary_angles_wide(dtype: str, tmp_path: Path) -> None:
    model = shaken(CONFIG)
    loaded = load_pretrained(write_decoder(tmp_path / "m.gguf", model, CONFIG), dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert loaded.to(torch.float32).model.rotary_emb.inv_freq.dtype == torch.float32


def write_folder(folder: Path, model: CausalLM, config: DecoderConfig, shards: int = 1, **more: object) -> Path:
    """A Hugging Face folder as their library writes one."""
    folder.mkdir(exist_ok=True)
    data = {"model_type": "qwen2" if config.qkv_bias else "llama", "hidden_size": config.hidden, "intermediate_size": config.intermediate,
            "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
            "vocab_size": config.vocab, "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
            "tie_word_embeddings": config.tied, "hidden_act": "silu"} | more  # fmt: skip
    (folder / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    tensors = {n: t.clone() for n, t in model.state_dict().items() if not (config.tied and n == "lm_head.weight")}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("config", [CONFIG, QWEN, replace(CONFIG, rope_factor=32.0)])
def test_folder_gives_back_the_model_it_was_written_from(config: DecoderConfig, shards: int, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    model = shaken(config)
    folder = write_folder(tmp_path / "f", model, config, shards, rope_scaling=scaling if config.rope_factor != 1.0 else None)
    assert torch.equal(outputs(load_pretrained(folder)), outputs(model))


def test_folder_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = shaken(CONFIG)
    reference = transformers.LlamaForCausalLM.from_pretrained(write_folder(tmp_path / "f", model, CONFIG), attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(load_pretrained(tmp_path / "f")(IDS), reference.eval()(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_attention_heads": 5}, "heads"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_hidden_layers": None}, "layers"),
        ({"hidden_size": "48"}, "hidden"),
        ({"rms_norm_eps": -1}, "norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ is missing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ in \S+ has no place"),
        ({"intermediate_size": 64}, r"mlp\.\S+ in \S+ is torch\.float32 \["),
    ],
)
def test_configs_the_decoder_does_not_compute_are_refused(more: dict[str, object], word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=word):
        load_pretrained(write_folder(tmp_path / "f", shaken(CONFIG), CONFIG, **more))


def test_nothing_but_numbers_and_names_it_has(tmp_path: Path) -> None:
    model = shaken(CONFIG)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.up_proj\.weight .*not finite"):
        load_pretrained(write_decoder(tmp_path / "m.gguf", model, CONFIG))
    folder = write_folder(tmp_path / "f", shaken(CONFIG), CONFIG)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no safetensors"):
        load_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelFileError, match="passwd"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("general.architecture", ("str", "gemma"), "architecture"),
        ("llama.rope.scaling.type", ("str", "yarn"), "scaling"),
        ("llama.expert_count", ("u32", 8), "expert_count"),
        ("llama.attention.head_count", ("[u32", [6, 6]), "heads"),
        ("llama.rope.dimension_count", ("u32", 4), "head_dim"),
        ("llama.block_count", ("u32", 2**31), "layers"),
        ("llama.rope.freq_base", ("f32", float("nan")), "rope_theta"),
    ],
)
def test_gguf_files_the_decoder_does_not_compute_are_refused(key: str, value: tuple[str, object], word: str, tmp_path: Path) -> None:
    metadata = decoder_metadata("llama", CONFIG) | {key: value}
    tensors = {"token_embd.weight": ("F32", (61, 48), bytes(61 * 48 * 4))}
    with pytest.raises(ModelFileError, match=word):
        load_pretrained(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    del tensors["token_embd.weight"]
    with pytest.raises(ModelFileError):
        load_pretrained(write_gguf(tmp_path / "m.gguf", decoder_metadata("llama", CONFIG), tensors))


@pytest.mark.parametrize("planted", [False, True])
def test_the_rotary_table_of_llama_3_is_taken_where_it_is_ours(planted: bool, tmp_path: Path) -> None:
    from ridgeline.workload.gguf import open_gguf
    from ridgeline.workload.models.decoder import rotary_frequencies
    from ridgeline.workload.pretrained_config import gguf_config

    config = replace(CONFIG, hidden=384, rope_factor=32.0)  # heads of 64: some waves are slow enough to be stretched
    table = rotary_frequencies(replace(config, rope_factor=1.0)) / rotary_frequencies(config)
    table[20] *= 1.01 if planted else 1.0
    embedding = ("F32", (61, 384), bytes(61 * 384 * 4))
    tensors = {"token_embd.weight": embedding, "output.weight": embedding, "rope_freqs.weight": ("F32", (32,), table.numpy().tobytes())}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", decoder_metadata("llama", config), tensors))
    if planted:
        with pytest.raises(ModelFileError, match="rope_freqs"):
            gguf_config(file)
    else:
        assert gguf_config(file) == config


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("mutated")
    path = write_decoder(folder / "whole.gguf", shaken(CONFIG), CONFIG)
    return folder / "m.gguf", path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.integers(0, 1900), st.integers(0, 255)), min_size=1, max_size=3))
def test_mutated_model_files_are_loaded_or_refused(small_file: tuple[Path, bytes], places: list[tuple[int, int]]) -> None:
    path, content = small_file
    mutated = bytearray(content)
    for place, value in places:
        mutated[place] = value
    path.write_bytes(mutated)
    try:
        model = load_pretrained(path)
    except RidgelineError:
        return
    assert sum(p.numel() for p in model.parameters()) * 4 <= 2 * len(content)


def weights_of(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    module = build_named(name, CaseOptions(device="cpu")).module
    return {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in module.state_dict().items()}


@pytest.mark.parametrize("form", ["plain", "wrapped", "old", "safetensors"])
def test_named_model_with_weights(form: str, tmp_path: Path) -> None:
    state, path = weights_of("resnet20"), tmp_path / "w.th"
    if form == "safetensors":
        path = tmp_path / "w.safetensors"
        save_file(state, path)
    elif form == "plain":
        torch.save(state, path)
    else:
        kept = {f"module.{n}": t for n, t in state.items() if form == "wrapped" or "num_batches" not in n}
        torch.save({"state_dict": kept, "best_prec1": 91.0}, path)
    model = load_pretrained("resnet20", weights=path)
    assert not model.training and all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


class Payload:
    """Runs when unpickled by a loader that trusts the file."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("owned",)


def test_weights_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("code.th").write_bytes(pickle.dumps({"state_dict": Payload()}, protocol=2))
    Path("graph.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch")
    for name in ("code.th", "graph.onnx"):
        with pytest.raises(ModelFileError, match=name) as caught:
            load_pretrained("resnet20", weights=name)
        # torch's own words for it are to load the file with its guard off
        assert (
            "no state dict of tensors" in caught.value.why
            and "weights_only" not in str(caught.value)
            and "torch.load" not in str(caught.value)
        )
    assert not Path("owned").exists()
    state = weights_of("resnet20")
    cases: dict[str, object] = {
        r"conv1\.weight .*is torch.float32 \[16, 3, 5, 5\]": state | {"conv1.weight": torch.zeros(16, 3, 5, 5)},
        r"linear\.bias is missing": {n: t for n, t in state.items() if n != "linear.bias"},
        r"extra .*has no place": state | {"extra": torch.zeros(1)},
        r"bn1\.bias .*not finite": state | {"bn1.bias": torch.full((16,), float("nan"))},
        r"linear\.bias .*is torch.int64": state | {"linear.bias": torch.zeros(10, dtype=torch.int64)},
        "holds no state dict": [1, 2],
    }
    for word, content in cases.items():
        torch.save(content, "w.th")
        with pytest.raises(ModelFileError, match=word):
            load_pretrained("resnet20", weights="w.th")
    with pytest.raises(ModelFileError, match="does not exist"):
        load_pretrained("resnet20", weights="nowhere.th")


def test_what_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"resnet56-4bfd9763\.th[\s\S]*{tmp_path}[\s\S]*akamaster"):
        load_pretrained("resnet56")
    with pytest.raises(ModelFileError, match="vgg16"):
        load_pretrained("vgg16")
    with pytest.raises(ModelFileError, match="nothing-here"):
        load_pretrained(tmp_path / "nothing-here")
    with pytest.raises(OptionError, match="int8"):
        load_pretrained("resnet56", dtype="int8")
    path = write_decoder(tmp_path / "m.gguf", shaken(CONFIG), CONFIG)
    with pytest.raises(OptionError, match="weights"):
        load_pretrained(path, weights=path)
    with pytest.raises(ModelFileError, match=r"not smollm2-135m[\s\S]*layers, hidden"):
        load_pretrained("smollm2-135m", weights=path)


def test_perplexity_of_the_real_language_model() -> None:
    """Windows of 512 tokens from the start of WikiText-2 raw test, 511 predicted in each; 357 where q and k keep the file's order."""
    try:
        model, path = load_pretrained("smollm2-135m"), find_file("text/wikitext2_raw_test.txt", get="")
        ids = load_tokenizer(find_file(PUBLISHED["smollm2-135m"][0], get="")).encode(read_text(path)[:20_000])
    except DataError:
        pytest.skip("needs SmolLM2 and WikiText-2 under RIDGELINE_DATA")
    count = 6 if os.environ.get("RIDGELINE_FULL") == "1" else 1
    windows = torch.tensor(ids[: count * 512]).reshape(count, 512)
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(window[None, :-1])[0], window[1:]) for window in windows]
    perplexity = float(torch.stack(losses).mean().exp())
    assert abs(perplexity - 28.923) < 0.01 if count == 6 else perplexity < 40


@pytest.mark.parametrize(("name", "right"), [("resnet20", 9173), ("resnet56", 9339)])
def test_published_accuracy(name: str, right: int) -> None:
    try:
        model, data = load_pretrained(name), load_data("cifar10")
    except DataError:
        pytest.skip("needs CIFAR-10 and the published weights under RIDGELINE_DATA")
    rows = len(data.test) if os.environ.get("RIDGELINE_FULL") == "1" else 500
    with torch.no_grad():
        found = torch.cat([model(data.prepare(part)).argmax(1) for part in data.test.inputs[:rows].split(250)])
    hits = int((found == data.test.targets[:rows]).sum())
    assert hits == right if rows == len(data.test) else hits >= 0.88 * rows
