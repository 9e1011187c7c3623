"""The named models: published sizes, names and work; the same numbers as transformers; lean graphs; nothing allocated on meta."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.workload.case import CaseOptions, ModelCase
from ridgeline.workload.models import MODELS, alexnet, bert, build_named, decoder, gpt2, model_names, vit

PUBLISHED_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "alexnet": 60_965_224,
    "vgg16": 138_357_544,
    "mobilenet-v2": 3_504_872,
    "resnet20": 269_722,
    "resnet56": 853_018,
    "digits-cnn": 20_810,  # ours
    "vit-b16": 86_567_656,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "smollm2-135m": 134_515_008,
}

# Multiply-adds of one image, in thousand millions. torchvision's tables, but for alexnet: Sze 2017, table II (724 M).
PUBLISHED_GMACS = {
    "resnet18": 1.814,
    "resnet34": 3.664,
    "resnet50": 4.089,
    "resnet101": 7.801,
    "alexnet": 0.724,
    "vgg16": 15.470,
    "mobilenet-v2": 0.301,
}

LAYERS = {
    "resnet18": ["conv1", "bn1", "layer1.0.conv1", "layer2.0.downsample.0", "layer4.1.bn2", "fc"],
    "resnet50": ["layer1.0.downsample.0", "layer3.5.conv3", "layer4.2.bn3"],
    "alexnet": ["features.0", "features.12", "classifier.1", "classifier.6"],
    "vgg16": ["features.0", "features.28", "classifier.0", "classifier.6"],
    "mobilenet-v2": ["features.0.0", "features.1.conv.0.0", "features.2.conv.1.0", "features.17.conv.3", "features.18.1", "classifier.1"],
    "resnet56": ["conv1", "bn1", "layer1.0.conv1", "layer2.0.shortcut", "layer3.8.bn2", "linear"],
    "digits-cnn": ["conv1", "bn3", "fc2"],
    "vit-b16": ["conv_proj", "encoder.layers.encoder_layer_0.ln_1", "encoder.layers.encoder_layer_11.self_attention.out_proj",
                "encoder.layers.encoder_layer_3.mlp.3", "encoder.ln", "heads.head"],
    "bert-base": ["bert.embeddings.LayerNorm", "bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.11.output.dense",
                  "bert.pooler.dense"],
    "gpt2": ["transformer.wpe", "transformer.h.0.attn.c_attn", "transformer.h.11.mlp.c_proj", "lm_head"],
    "llama-3-8b": ["model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.31.mlp.gate_proj",
                   "model.layers.0.input_layernorm", "model.norm", "lm_head"],
}  # fmt: skip

# The same code with other sizes: exported only in the full run.
SIBLINGS = {"resnet34", "resnet56", "resnet101", "bert-large", "gpt2-medium", "llama-3.2-1b", "qwen2.5-1.5b", "smollm2-135m"}
EXPORTED = [name for name in MODELS if os.environ.get("RIDGELINE_FULL") or name not in SIBLINGS]

# What the graphs may hold. A cast, clone or contiguous anywhere else is waste the estimate would charge for.
ARITHMETIC = {
    "adaptive_avg_pool2d", "add", "add_", "avg_pool3d", "batch_norm", "cat", "conv2d", "cos", "div", "embedding", "gelu", "hardtanh_",
    "index_copy_", "layer_norm", "linear", "max_pool2d", "mul", "neg", "pad", "pow", "relu_", "rms_norm", "scaled_dot_product_attention",
    "silu", "sin", "tanh",
}  # fmt: skip
VIEWS = {"chunk", "dropout", "expand", "flatten", "permute", "select", "slice", "split", "squeeze", "transpose", "unbind",
         "unsqueeze", "view"}  # fmt: skip


def on_cpu(name: str, **options: object) -> ModelCase:
    return build_named(name, CaseOptions(device="cpu", **options))  # type: ignore[arg-type]


def run(case: ModelCase) -> torch.Tensor:
    with torch.no_grad():
        return case.module(*case.args, **case.kwargs)


def modules(name: str) -> dict[str, nn.Module]:
    return dict(build_named(name, CaseOptions()).module.named_modules())


def test_importing_the_names_does_not_import_torch() -> None:
    code = "import sys, ridgeline.workload.models as m; assert m.model_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0


def test_every_name_is_checked_here() -> None:
    assert model_names() == list(PUBLISHED_PARAMETERS)
    assert all(name == info.name for name, info in MODELS.items())


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_the_published_count(name: str) -> None:
    module = build_named(name, CaseOptions()).module
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED_PARAMETERS[name] == MODELS[name].parameters


@pytest.mark.parametrize("name", PUBLISHED_GMACS)
def test_work_is_the_published_count(name: str) -> None:
    case = build_named(name, CaseOptions(batch=2))
    with FlopCounterMode(display=False) as counter:
        output = run(case)
    assert output.shape == (2, 1000)
    assert round(counter.get_total_flops() / 2 / 2 / 1e9, 3) == PUBLISHED_GMACS[name]  # two images, two FLOPs a multiply-add


@pytest.mark.parametrize("name", LAYERS)
def test_layer_names(name: str) -> None:
    assert set(LAYERS[name]) <= modules(name).keys()


@pytest.mark.parametrize(("name", "blocks"), [("resnet20", 3), ("resnet56", 9)])
def test_work_of_the_cifar_nets_is_that_of_the_paper(name: str, blocks: int) -> None:
    """He 2015, section 4.2: 1 + 2n convolutions of 16 channels at 32x32, 2n of 32 at 16x16, 2n of 64 at 8x8, and 10 classes."""
    with FlopCounterMode(display=False) as counter:
        output = run(build_named(name, CaseOptions(batch=2)))
    stem, narrow, later = 32 * 32 * 9 * 3 * 16, 2 * blocks * 32 * 32 * 9 * 16 * 16, 16 * 16 * 9 * (16 * 32 + (2 * blocks - 1) * 32 * 32)
    assert output.shape == (2, 10) and counter.get_total_flops() == 2 * 2 * (stem + narrow + 2 * later + 64 * 10)


def test_shortcuts_of_the_cifar_nets_have_no_weights_and_pad_with_zeros() -> None:
    net = on_cpu("resnet20").module
    assert not any("shortcut" in name for name in net.state_dict())
    x = torch.randn(2, 16, 6, 6)
    out = net.layer2[0].shortcut(x)
    expected = torch.zeros(2, 32, 3, 3)
    for channel in range(16):
        for row in range(3):
            for column in range(3):
                expected[:, 8 + channel, row, column] = x[:, channel, 2 * row, 2 * column]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("name", "shape"), [("resnet20", (3, 32, 32)), ("digits-cnn", (1, 8, 8))])
def test_small_nets_trace_and_export_for_any_batch(name: str, shape: tuple[int, ...]) -> None:
    net = shaken(on_cpu(name).module)
    images = torch.randn(5, *shape, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = net(images.clone())
        torch.testing.assert_close(torch.fx.symbolic_trace(net)(images.clone()), expected, rtol=0, atol=0)
        program = torch.export.export(net, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
        torch.testing.assert_close(program.module()(images.clone()), expected, rtol=1e-5, atol=1e-5)
        singles = torch.cat([net(image[None].clone()) for image in images])
    torch.testing.assert_close(singles, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_alexnet_is_the_grouped_net_of_2012() -> None:
    convolutions = [m for m in modules("alexnet").values() if isinstance(m, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [96, 256, 384, 384, 256]
    assert [c.groups for c in convolutions] == [1, 2, 1, 2, 2]
    assert (convolutions[0].kernel_size, convolutions[0].stride) == ((11, 11), (4, 4))


def test_alexnet_norm_is_the_formula_of_the_paper() -> None:
    x = 30 * torch.randn(1, 7, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.empty_like(x)
    for channel in range(7):
        near = x[:, max(0, channel - 2) : min(7, channel + 3)]
        expected[:, channel] = x[:, channel] / (2 + 1e-4 * near.square().sum(1)) ** 0.75
    torch.testing.assert_close(alexnet._norm()(x), expected)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "alexnet", "mobilenet-v2", "vit-b16"])
def test_runs_on_the_cpu_at_its_default_size(name: str) -> None:
    case = on_cpu(name)
    image = case.args[0].clone()
    first, second = run(case), run(case)
    assert first.shape == (1, 1000) and first.dtype == torch.float32 and first.isfinite().all() and first.std() > 0
    assert torch.equal(first, second) and torch.equal(image, case.args[0]), "the input must survive the in-place activations"


def test_bert_gives_a_sequence_and_a_pooled_token() -> None:
    case = on_cpu("bert-base", batch=2, context=16)
    with torch.no_grad():
        sequence, pooled = case.module(*case.args)
    assert sequence.shape == (2, 16, 768) and pooled.shape == (2, 768) and case.context == 16 and case.phase is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_decoder_runs_in_both_phases(phase: str, dtype: str) -> None:
    case = on_cpu("smollm2-135m", phase=phase, batch=2, context=24, dtype=dtype)
    logits = run(case)
    assert logits.shape == (2, 24 if phase == "prefill" else 1, 49_152)
    assert logits.dtype == getattr(torch, dtype) and logits.isfinite().all()
    assert case.module.model.rotary_emb.inv_freq.dtype == torch.float32, "rotary angles need more digits than bfloat16 has"
    if phase == "decode":
        assert case.args[1].tolist() == [23]
        assert [tuple(t.shape) for pair in case.kwargs["kv_cache"] for t in pair] == [(2, 3, 24, 64)] * 60


def test_defaults() -> None:
    llama, image, text = (build_named(name, CaseOptions()) for name in ("llama-3-8b", "resnet18", "bert-base"))
    assert (llama.phase, llama.context, llama.dtype, llama.batch) == ("prefill", 1024, "bfloat16", 1)
    assert (image.phase, image.context, image.dtype, image.args[0].shape) == (None, None, "float32", (1, 3, 224, 224))
    assert (text.phase, text.context, text.dtype) == (None, 128, "float32")
    for case in (llama, image, text):
        assert not any(m.training for m in case.module.modules()) and not any(p.requires_grad for p in case.module.parameters())
        assert {p.dtype for p in case.module.parameters()} == {getattr(torch, case.dtype)}


def test_building_is_repeatable_and_leaves_torch_as_it_was() -> None:
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    first, second = on_cpu("mobilenet-v2", dtype="fp64"), on_cpu("mobilenet-v2", dtype="fp64")
    assert first.dtype == "float64" and torch.equal(first.args[0], second.args[0])
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state()) and torch.get_default_dtype() == dtype
    assert torch.empty(0).device.type == "cpu"


def test_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"resnet50[\s\S]*ridgeline models"):
        build_named("resnet5", CaseOptions())


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("resnet18", CaseOptions(batch=0), "batch"),
        ("resnet18", CaseOptions(phase="decode"), "phase"),
        ("bert-base", CaseOptions(phase="prefill"), "phase"),
        ("resnet18", CaseOptions(context=8), "context"),
        ("vit-b16", CaseOptions(context=8), "context"),
        ("gpt2", CaseOptions(phase="train"), "phase"),
        ("gpt2", CaseOptions(context=0), "context"),
        ("gpt2", CaseOptions(context=1025), "1024"),
        ("bert-base", CaseOptions(context=513), "512"),
        ("resnet18", CaseOptions(dtype="int8"), "int8"),
        ("resnet18", CaseOptions(dtype="tf32"), "tf32"),
        ("resnet18", CaseOptions(dtype="flaot32"), "flaot32"),
    ],
)
def test_options_that_make_no_sense(name: str, options: CaseOptions, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        build_named(name, options)


@pytest.mark.parametrize(("name", "phase"), [(n, p) for n in EXPORTED for p in MODELS[n].phases or (None,)])
def test_exports_on_meta_as_a_lean_graph_that_uses_every_weight(name: str, phase: str | None) -> None:
    case = build_named(name, CaseOptions(phase=phase))
    with torch.no_grad():
        program = torch.export.export(case.module, case.args, case.kwargs)
    counts = Counter(n.target.overloadpacket.__name__ for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    casts = 2 if MODELS[name].build == ".decoder:build" else 0  # cos and sin, once a pass
    assert counts.pop("to", 0) == counts.pop("_assert_tensor_metadata", 0) == casts
    assert counts.keys() <= ARITHMETIC | VIEWS
    layers = sum(type(m).__name__ in ("SelfAttention", "Attention") for m in case.module.modules())
    assert counts["scaled_dot_product_attention"] == layers and counts["index_copy_"] == (2 * layers if phase == "decode" else 0)
    weights = dict(case.module.named_parameters(remove_duplicate=False))
    used = [program.graph_signature.inputs_to_parameters.get(n.name) for n in program.graph.nodes if n.op == "placeholder" and n.users]
    assert {id(weights[name]) for name in used if name} == {id(weight) for weight in weights.values()}


def test_llama_on_meta_allocates_nothing_and_reads_15_gb_a_token() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case = build_named("llama-3-8b", CaseOptions(phase="decode", context=192))
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib)
    assert grown_bytes < 100e6, "the weights alone are 16 GB"
    tensors = [*case.module.parameters(), *case.module.buffers(), *case.args, *(t for pair in case.kwargs["kv_cache"] for t in pair)]
    assert all(t.is_meta for t in tensors)
    read = sum(p.numel() * p.element_size() for n, p in case.module.named_parameters() if "embed_tokens" not in n)
    assert read == 15_009_849_344


TINY_LLAMA = decoder.DecoderConfig(layers=2, hidden=48, intermediate=80, heads=6, kv_heads=2, vocab=61, rope_theta=5e5)
TINY_QWEN = replace(TINY_LLAMA, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied=True)
TINY_GPT2 = gpt2.GPT2Config(layers=2, hidden=48, heads=4, vocab=61, positions=32)
TINY_BERT = bert.BertConfig(layers=2, hidden=48, heads=4, intermediate=80, vocab=61, positions=32)
TINY_VIT = vit.ViTConfig(image=32, patch=8, layers=2, hidden=48, heads=4, intermediate=80, classes=7)


def shaken(model: nn.Module) -> nn.Module:
    """Weights large enough that attention, gates and biases all show in the output; initial ones hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.7, generator=generator)
    return model.eval()


def token_ids(*shape: int) -> torch.Tensor:
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(2))


def reference_llama(config: decoder.DecoderConfig) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = "Qwen2" if config.qkv_bias else "Llama"
    sizes = {"hidden_size": config.hidden, "intermediate_size": config.intermediate, "num_hidden_layers": config.layers,
             "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "vocab_size": config.vocab,
             "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied, "bos_token_id": 0, "eos_token_id": 0,
             "attn_implementation": "eager"}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1.0:
        rope |= {"rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192}  # fmt: skip
    settings = getattr(transformers, f"{kind}Config")(**sizes, rope_parameters=rope, max_position_embeddings=131_072)
    return shaken(getattr(transformers, f"{kind}ForCausalLM")(settings))


def tiny_decoder(config: decoder.DecoderConfig) -> tuple[nn.Module, nn.Module]:
    """Ours and transformers', with the same weights; loading is strict, so the names agree too."""
    reference, ours = reference_llama(config), decoder.CausalLM(config).eval()
    ours.load_state_dict(reference.state_dict())
    return ours, reference


def tiny_gpt2() -> tuple[nn.Module, nn.Module]:
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=0,
                                       attn_implementation="eager")  # fmt: skip
    reference, ours = shaken(transformers.GPT2LMHeadModel(settings)), gpt2.GPT2(TINY_GPT2).eval()
    transposed = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    ours.load_state_dict({n: w.t() if n.endswith(transposed) else w for n, w in reference.state_dict().items()})
    return ours, reference


PAIRS = {
    "llama": lambda: tiny_decoder(TINY_LLAMA),
    "llama with scaled rotary positions": lambda: tiny_decoder(replace(TINY_LLAMA, rope_factor=32.0)),
    "qwen2": lambda: tiny_decoder(TINY_QWEN),
    "gpt2": tiny_gpt2,
}


@pytest.mark.parametrize("kind", PAIRS)
def test_decoder_prefill_equals_transformers_and_decode_equals_prefill(kind: str) -> None:
    ours, reference = PAIRS[kind]()
    config = TINY_GPT2 if kind == "gpt2" else TINY_LLAMA
    batch, length = 2, 11
    place = torch.full((batch, getattr(config, "kv_heads", config.heads), 1, config.hidden // config.heads), 9.0)
    ids = token_ids(batch, length)
    cache = [(place[:, :, :0], place[:, :, :0])] * config.layers
    with torch.no_grad():
        logits = ours(ids, torch.arange(length))
        torch.testing.assert_close(logits, reference(ids).logits, rtol=1e-4, atol=1e-4)
        for step in range(length):
            # One more place in every cache, junk until the step writes it.
            cache = [(torch.cat((key, place), 2), torch.cat((value, place), 2)) for key, value in cache]
            one = ours(ids[:, step : step + 1], torch.tensor([step]), kv_cache=cache)
            torch.testing.assert_close(one[:, 0], logits[:, step], rtol=1e-4, atol=1e-4)
            assert all((t[:, :, step] != 9).all() for pair in cache for t in pair)


@pytest.mark.parametrize("name", decoder.CONFIGS)
def test_rotary_frequencies_equal_transformers(name: str) -> None:
    config = decoder.CONFIGS[name]
    small = replace(config, layers=1, hidden=2 * config.head_dim, intermediate=8, heads=2, kv_heads=1, vocab=8)
    assert small.head_dim == config.head_dim
    torch.testing.assert_close(decoder.rotary_frequencies(config), reference_llama(small).model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_comparison_with_transformers_sees_a_one_percent_error() -> None:
    ours, reference = tiny_decoder(TINY_LLAMA)
    ids = token_ids(2, 11)
    with torch.no_grad():
        ours.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(ours(ids, torch.arange(11)), reference(ids).logits, rtol=1e-4, atol=1e-4)


def test_bert_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.BertConfig(vocab_size=61, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80,
                                       max_position_embeddings=32, attn_implementation="eager")  # fmt: skip
    reference, ours = shaken(transformers.BertModel(settings)), bert.Bert(TINY_BERT).eval()
    ours.load_state_dict({f"bert.{n}": w for n, w in reference.state_dict().items()})
    ids, kinds = token_ids(3, 9), token_ids(3, 9) % 2
    with torch.no_grad():
        expected = reference(ids, token_type_ids=kinds)
        sequence, pooled = ours(ids, kinds)
    torch.testing.assert_close(sequence, expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pooled, expected.pooler_output, rtol=1e-4, atol=1e-4)


def reference_vit(ours: vit.VisionTransformer, config: vit.ViTConfig, image: torch.Tensor) -> torch.Tensor:
    """Patches cut out by hand, then torch's own encoder layers."""
    weights, side = ours.state_dict(), config.patch
    tokens = [weights["class_token"].expand(image.size(0), 1, -1)[:, 0]]
    for row in range(0, config.image, side):
        for column in range(0, config.image, side):
            patch = image[:, :, row : row + side, column : column + side].flatten(1)
            tokens.append(patch @ weights["conv_proj.weight"].flatten(1).t() + weights["conv_proj.bias"])
    x = torch.stack(tokens, 1) + weights["encoder.pos_embedding"]
    names = {"norm1": "ln_1", "norm2": "ln_2", "linear1": "mlp.0", "linear2": "mlp.3", "self_attn": "self_attention"}
    for index in range(config.layers):
        layer = nn.TransformerEncoderLayer(config.hidden, config.heads, config.intermediate, dropout=0.0, activation="gelu",
                                           layer_norm_eps=1e-6, batch_first=True, norm_first=True, dtype=torch.float64)  # fmt: skip
        prefix = f"encoder.layers.encoder_layer_{index}."
        layer.load_state_dict(
            {n: weights[prefix + n.replace(head, names[head], 1)] for n in layer.state_dict() for head in [n.split(".")[0]]}
        )
        x = layer(x)
    normalised = nn.functional.layer_norm(x, (config.hidden,), weights["encoder.ln.weight"], weights["encoder.ln.bias"], eps=1e-6)
    return normalised[:, 0] @ weights["heads.head.weight"].t() + weights["heads.head.bias"]


def test_vit_equals_torch_encoder_layers() -> None:
    ours = shaken(vit.VisionTransformer(TINY_VIT)).double()
    image = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = reference_vit(ours, TINY_VIT, image)
        torch.testing.assert_close(ours(image), expected, rtol=1e-9, atol=1e-9)
        ours.encoder.layers[0].self_attention.in_proj_weight[:48].mul_(1.01)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(ours(image), expected, rtol=1e-4, atol=1e-4)
