"""Hugging Face folders: configs alone, in both phases, against transformers' own passes; and configs that are broken or unsafe."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import capture
from ridgeline.core.errors import CaptureError, MissingExtraError, ModelFileError, OptionError, RidgelineError
from ridgeline.workload.capture import capture_case
from ridgeline.workload.case import CaseOptions, ModelCase
from ridgeline.workload.exported import export_case
from ridgeline.workload.huggingface import build_folder, is_folder

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 256}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **GROUPED},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **GROUPED},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **GROUPED, "sliding_window": 12},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100,
             "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES},
    "decoder without head": {"model_type": "llama", **GROUPED},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1,
           "num_heads": 4, "vocab_size": 100},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], **SIZES, "image_size": 32, "patch_size": 8},
    "resnet": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "embedding_size": 16, "hidden_sizes": [16, 32],
               "depths": [1, 1], "layer_type": "basic"},
}  # fmt: skip


def folder(path: Path, config: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return str(path)


def on_cpu(path: str, **options: Any) -> ModelCase:
    with pytest.warns(UserWarning, match="weights are random"):
        return build_folder(path, CaseOptions(device="cpu", **options))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", CAUSAL)
def test_flops_of_language_models_equal_torchs_count(tmp_path: Path, name: str, phase: str) -> None:
    case = build_folder(folder(tmp_path / name, CAUSAL[name]), CaseOptions(batch=2, phase=phase, context=32))
    assert all(parameter.is_meta for parameter in case.module.parameters())
    workload, exported = capture_case(case), export_case(case).module()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        exported(**case.kwargs)
    assert workload.matmul_flops == counter.get_total_flops() > 0
    assert workload.captured_by == "torch.export" and all(u.zero_flop for u in workload.uncounted)
    assert (workload.model, workload.batch, workload.phase, workload.context) == (name, 2, phase, 32)
    assert (workload.bytes_of("kv_cache") > 0) == (phase == "decode")


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_counted_whole(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / name, OTHERS[name])
    one, two = capture(path), capture(path, batch=2)
    assert one.captured_by == "torch.export" and all(u.zero_flop for u in one.uncounted)
    assert two.matmul_flops == 2 * one.matmul_flops > 0
    assert (one.phase, one.context) == (None, None if name in ("vit", "resnet") else 128)


def test_decode_reads_the_cache_once(tmp_path: Path) -> None:
    """Each of 2 layers keeps keys and values of 2 heads of 16 in bfloat16; only the new token's are written, no head is copied."""
    workload = capture(folder(tmp_path / "llama", CAUSAL["llama"]), phase="decode", context=64, batch=3, dtype="bfloat16")
    token = 2 * 2 * 3 * 2 * 16 * 2
    attention = [op for op in workload.ops if op.kind == "attention"]
    assert sum(op.bytes_of("kv_cache") for op in attention) == 64 * token
    assert 0 < workload.bytes_of("kv_cache") - 64 * token <= 2 * token
    assert attention[0].loops[0].dims == {"B": 12, "M": 1, "N": 64, "K": 16}


def test_layers_keep_their_names_in_both_phases(tmp_path: Path) -> None:
    path = folder(tmp_path / "llama", CAUSAL["llama"])
    layers = [{op.layer for op in capture(path, phase=phase, context=8).ops if op.kind == "linear"} for phase in ("prefill", "decode")]
    assert layers[0] == layers[1] and {"model.layers.0.self_attn.q_proj", "lm_head"} <= layers[0]


@pytest.mark.parametrize("name", CAUSAL)
def test_passes_answer_as_transformers_does(tmp_path: Path, name: str) -> None:
    """Our attention without masks, and one decode step on a cache filled by transformers, give its eager logits (float64)."""
    path = folder(tmp_path / name, CAUSAL[name])
    prefill, decode = (on_cpu(path, batch=2, phase=phase, context=24, dtype="float64") for phase in ("prefill", "decode"))
    reference = (
        type(prefill.module)._from_config(copy.deepcopy(prefill.module.config), dtype=torch.float64, attn_implementation="eager").eval()
    )
    for module in (prefill.module, decode.module):
        module.load_state_dict(reference.state_dict())
    ids, cache = prefill.kwargs["input_ids"], transformers.DynamicCache(config=reference.config)
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits
        reference(ids[:, :-1], past_key_values=cache, use_cache=True)
        for (keys, values), layer in zip(decode.kwargs["kv_cache"], cache.layers, strict=True):
            for ours, theirs in ((keys, layer.keys), (values, layer.values)):
                assert ours.shape[2] == min(24, CAUSAL[name].get("sliding_window") or 24)
                ours[:, :, :-1] = theirs[:, :, 1 - ours.shape[2] :]
                ours[:, :, -1] = torch.nan  # the place the step must fill
        torch.testing.assert_close(prefill.module(ids).logits, expected, atol=1e-6, rtol=0)  # rotations are made in float32
        for attention in ("ridgeline", "eager"):  # the second asks the cache for the size of its masks
            decode.module.config._attn_implementation = attention
            step = decode.module(ids[:, -1:], decode.kwargs["kv_cache"])
            torch.testing.assert_close(step[:, 0], expected[:, -1], atol=1e-6, rtol=0)


def test_dtype_comes_from_the_option_then_the_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CAUSAL["llama"] | {"torch_dtype": "bfloat16"})
    assert build_folder(path, CaseOptions()).dtype == "bfloat16"
    assert build_folder(path, CaseOptions(dtype="float16")).module.dtype == torch.float16
    assert capture(path, dtype="int8", context=8).dtype == "int8"
    with pytest.raises(OptionError, match="do not compute in it"):
        build_folder(path, CaseOptions(dtype="int8"))


def test_default_contexts(tmp_path: Path) -> None:
    short, long = (folder(tmp_path / str(most), CAUSAL["llama"] | {"max_position_embeddings": most}) for most in (256, 4096))
    assert [build_folder(path, CaseOptions()).context for path in (short, long)] == [256, 1024]
    assert build_folder(folder(tmp_path / "bert", OTHERS["bert"]), CaseOptions()).context == 128


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CAUSAL["llama"], CaseOptions(phase="training")),
        (CAUSAL["llama"], CaseOptions(context=257)),
        (CAUSAL["llama"], CaseOptions(context=0)),
        (CAUSAL["llama"], CaseOptions(batch=0)),
        (OTHERS["bert"], CaseOptions(phase="prefill")),
        (OTHERS["vit"], CaseOptions(phase="decode")),
        (OTHERS["vit"], CaseOptions(context=8)),
        (OTHERS["decoder without head"], CaseOptions(phase="decode")),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, config: dict[str, Any], options: CaseOptions) -> None:
    with pytest.raises(OptionError):
        build_folder(folder(tmp_path / "m", config), options)


def test_weights_come_from_safetensors(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CAUSAL["llama"])
    case = on_cpu(path, phase="prefill", context=4)
    with torch.no_grad():
        case.module.lm_head.weight.fill_(0.5)
    case.module.save_pretrained(path, max_shard_size="100KB")
    assert (Path(path) / "model.safetensors.index.json").is_file()
    for phase in ("prefill", "decode"):
        loaded = build_folder(path, CaseOptions(device="cpu", phase=phase, context=4))
        assert not loaded.module.training and torch.equal(loaded.module.lm_head.weight, case.module.lm_head.weight)
    assert next(build_folder(path, CaseOptions()).module.parameters()).is_meta


def test_random_weights_are_repeatable_and_leave_the_seed_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CAUSAL["llama"])
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second = (on_cpu(path, context=4).module.lm_head.weight for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.rand(1), expected)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CAUSAL["llama"])
    (Path(path) / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert on_cpu(path, context=4).module.lm_head.weight.isfinite().all()


def test_an_index_may_name_only_its_neighbours(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CAUSAL["llama"])
    for content in ({"weight_map": {"a": "../x.safetensors"}}, {"weight_map": {"a": "model.bin"}}, {"weight_map": 3}, []):
        (Path(path) / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ModelFileError):
            build_folder(path, CaseOptions(device="cpu"))


def test_quantised_configs_say_they_are_built_unquantised(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CAUSAL["llama"] | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.warns(UserWarning, match="unquantised"):
        assert build_folder(path, CaseOptions()).dtype == "float32"


def test_unknown_classes_give_way_to_the_plain_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CAUSAL["llama"] | {"architectures": ["LlamaForSomethingNew"]})
    with pytest.warns(UserWarning, match=r"no LlamaForSomethingNew.*LlamaModel is built"):
        assert type(build_folder(path, CaseOptions()).module).__name__ == "LlamaModel"


def test_a_config_cannot_name_kernels_to_fetch(tmp_path: Path) -> None:
    names = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
    path = folder(tmp_path / "m", CAUSAL["llama"] | dict.fromkeys(names, "someone/kernel"))
    config = build_folder(path, CaseOptions()).module.config
    assert config._attn_implementation == "ridgeline" and config._experts_implementation != "someone/kernel"


DEEP = '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
HOSTILE: dict[str, Any] = {
    "not JSON": "model_type: llama",
    "not text": '{"model_type": "\\ud800',
    "deep": DEEP,
    "list": [CAUSAL["llama"]],
    "huge": json.dumps(CAUSAL["llama"] | {"x": "x" * 2**20}),
    "no model_type": {"hidden_size": 64},
    "model_type of another kind": {"model_type": 7},
    "unknown model_type": CAUSAL["llama"] | {"model_type": "lama"},
    "code": CAUSAL["llama"] | {"auto_map": {"AutoModel": "modeling.Evil"}},
    "nested code": CAUSAL["llama"] | {"text_config": {"auto_map": {"AutoModel": "modeling.Evil"}}},
    "layers without end": CAUSAL["llama"] | {"num_hidden_layers": 10**9},
    "depths without end": OTHERS["resnet"] | {"depths": [1, 10**9]},
    "wrong kind of number": CAUSAL["llama"] | {"hidden_size": "many"},
    "sizes that do not fit": CAUSAL["llama"] | {"num_attention_heads": 5},
    "another family's class": CAUSAL["llama"] | {"architectures": ["BertModel"]},
    "a class that is no model": CAUSAL["llama"] | {"architectures": ["AutoTokenizer"]},
    "architectures of another kind": CAUSAL["llama"] | {"architectures": "LlamaForCausalLM"},
    "audio": {"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]},
    "text and images": {"model_type": "clip", "architectures": ["CLIPModel"]},
}


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "hidden_size"])
def test_a_size_of_nothing_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"{key} = 0 in [\s\S]*a whole number above 0"):
        capture(folder(tmp_path / "m", CAUSAL["llama"] | {key: 0}), context=8)


@pytest.mark.parametrize("kind", HOSTILE)
def test_configs_that_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RidgelineError) as caught:
        capture(folder(tmp_path / "m", HOSTILE[kind]), context=8)
    assert type(caught.value) in (ModelFileError, CaptureError) and caught.value.do


def test_folder_without_config(tmp_path: Path) -> None:
    assert is_folder(str(tmp_path)) and not is_folder(str(tmp_path / "absent"))
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        capture(str(tmp_path))


def test_unknown_types_show_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nearest: .*llama"):
        capture(folder(tmp_path / "m", HOSTILE["unknown model_type"]))


def test_models_that_keep_other_states_have_no_decode_step(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100}
    with pytest.raises(CaptureError, match="no decode step"):
        capture(folder(tmp_path / "m", config), phase="decode")


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"ridgeline\[hf\]"):
        capture(folder(tmp_path / "m", CAUSAL["llama"]))
