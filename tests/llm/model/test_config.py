"""What a config.json may say, and that everything else is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import ModelFileError, UnknownNameError
from ridgeline.llm.model.config import CONTEXTS, ModelConfig, RopeScaling, config_named, config_of
from ridgeline.workload.models.decoder import CONFIGS

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 96, "max_position_embeddings": 512, "num_key_value_heads": 2,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}


def test_every_named_decoder_has_a_config() -> None:
    assert CONTEXTS.keys() == CONFIGS.keys()
    for name, sizes in CONFIGS.items():
        config = config_named(name)
        assert (config.hidden, config.layers, config.head_dim, config.tied) == (sizes.hidden, sizes.layers, sizes.head_dim, sizes.tied)
    assert config_named("llama-3.2-1b").rope_scaling == RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    with pytest.raises(UnknownNameError, match="llama-3-8b"):
        config_named("llama-3-9b")


def test_sizes_that_follow_from_a_config() -> None:
    config = config_named("llama-3-8b")
    assert config.kv_bytes_per_token(2) == 131_072
    assert config.weights == 7_504_658_432  # 8.03 billion less the input table and the norms
    assert config.window(3) is None


def test_older_and_newer_files_say_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = config_of({**LLAMA, "rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}, "old")
    new = config_of({**LLAMA, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 5e5}}, "new")
    assert old == new and new.rope_scaling == RopeScaling("llama3", 8.0) and new.rope_theta == 5e5
    assert config_of({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic").rope_scaling is None


def test_windows_of_each_family() -> None:
    assert config_of({**LLAMA, "model_type": "mistral", "sliding_window": 9}, "x").windows == (9, 9, 9, 9)
    assert config_of({**LLAMA, "model_type": "mistral", "sliding_window": None}, "x").windows is None
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 9, "max_window_layers": 3}
    assert config_of(qwen, "x").windows is None
    assert config_of({**qwen, "use_sliding_window": True}, "x").windows == (None, None, None, 9)


@pytest.mark.parametrize(
    ("changes", "named"),
    (
        ({"model_type": "gemma2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 2**23}, "hidden"),
        ({"num_hidden_layers": 10**6}, "layers"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"sliding_window": 5}, "sliding_window"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "rope_scaling.twist"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    ),
)
def test_what_is_not_computed_is_refused_by_its_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named.replace(".", r"\.")):
        config_of({**LLAMA, **changes}, "config.json")


@pytest.mark.parametrize("changes", ({"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}, {"n_head": 5}))
def test_gpt2_is_refused_likewise(changes: dict[str, Any]) -> None:
    assert config_of(GPT2, "x").norm == "layer"
    with pytest.raises(ModelFileError, match=next(iter(changes))):
        config_of({**GPT2, **changes}, "config.json")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**40), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "truncate"]), st.sampled_from(["yarn", "llama3", 2.0, 0, None])),
)  # fmt: skip
KEYS = [*LLAMA, "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "sliding_window", "use_sliding_window", "layer_types",
        "max_window_layers", "tie_word_embeddings", "rms_norm_eps", "hidden_act", "mlp_bias", "n_inner"]  # fmt: skip


@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gpt2"]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
)
def test_any_value_gives_a_config_or_a_clear_error(family: str, changes: dict[str, Any]) -> None:
    start = GPT2 if family == "gpt2" else {**LLAMA, "model_type": family}
    try:
        config = config_of({**start, **changes}, "config.json")
    except ModelFileError as error:
        assert "config.json" in error.what
        return
    assert isinstance(config, ModelConfig) and config.heads % config.kv_heads == 0 and config.layers <= 1000
