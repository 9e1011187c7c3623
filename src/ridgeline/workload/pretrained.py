"""Models with their trained weights, from files that are never trusted to run code.

    load_pretrained("resnet56")                         weights found under RIDGELINE_DATA, or weights="resnet56-4bfd9763.th"
    load_pretrained("model.gguf")                       a Llama or Qwen2 decoder in one file, dequantised to `dtype`
    load_pretrained("folder/")                          a Hugging Face folder: config.json and safetensors
        │ names mapped, every shape and dtype checked against the module built on the meta device: an error names the tensor
        ▼
    nn.Module in eval mode on the CPU

Rows of q and k: GGUF keeps those of Llama as pairs (2i, 2i+1) of one rotation, our `rotate` turns i with i + head_dim/2; half_split
brings them in order. Pickled weights are read with weights_only=True. Ref: Touvron 2023, Su 2021.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..core.errors import ModelFileError, OptionError
from .case import CaseOptions
from .data.find import find_file
from .gguf import Gguf, open_gguf
from .huggingface_config import first_line, has_safetensors, read_config
from .models import MODELS, build_named
from .models.decoder import CONFIGS, Cache, CausalLM, DecoderConfig, RotaryEmbedding, rotary_frequencies
from .pretrained_config import gguf_config, huggingface_config

PUBLISHED = {
    "resnet20": ("vision/resnet20-12fca82f.th", "download it from github.com/akamaster/pytorch_resnet_cifar10"),
    "resnet56": ("vision/resnet56-4bfd9763.th", "download it from github.com/akamaster/pytorch_resnet_cifar10"),
    "smollm2-135m": ("SmolLM2-135M-Instruct.Q4_1.gguf", "download it from huggingface.co (SmolLM2-135M-Instruct, GGUF Q4_1)"),
}
"""Name → the file its published weights come in, and where to get it."""

GGUF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""Names inside a layer, in the file and in the module."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class LanguageModel(CausalLM):
    """The decoder, called with token ids alone: positions count from 0 where none are given."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.config = config

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        """What .to() and .half() call: angles need more digits than bfloat16 has, so their table is made again in float32."""
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        rotary = self.model.rotary_emb
        if rotary.inv_freq.dtype.itemsize < 4:
            rotary.inv_freq = rotary_frequencies(self.config).to(rotary.inv_freq.device)
        return self

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, kv_cache: Cache | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(input_ids.size(1), device=input_ids.device)
        return super().forward(input_ids, positions, kv_cache)


def load_pretrained(name_or_path: str | Path, weights: str | Path | None = None, *, dtype: str = "float32") -> nn.Module:
    """A named model with `weights` (or its published ones), a GGUF file, or a Hugging Face folder; in eval mode, on the CPU."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r}", why="weights are not loaded in it", do=f"give one of {', '.join(DTYPES)}")
    name = str(name_or_path)
    if name in MODELS:
        model = _named(name, weights)
    elif weights is not None:
        raise OptionError(f"weights {weights} for {name}", why="a file or folder brings its own", do="leave the weights out")
    else:
        model = _decoder(Path(name))
    return model.to(DTYPES[dtype]).eval()


def _named(name: str, weights: str | Path | None) -> nn.Module:
    if weights is None and name not in PUBLISHED:
        known = ", ".join(PUBLISHED)
        raise ModelFileError(f"no weights for {name}", why=f"published files are known of {known} only", do="give weights=a file")
    file = find_file(PUBLISHED[name][0], Path(PUBLISHED[name][0]).name, get=PUBLISHED[name][1]) if weights is None else Path(weights)
    if name in CONFIGS:
        return _decoder(file, wanted=name)
    model = build_named(name, CaseOptions(device="cpu")).module.requires_grad_(True)
    fill(model, read_weights(file), str(file))
    return model


def _decoder(path: Path, wanted: str | None = None) -> nn.Module:
    """A decoder from a GGUF file or a folder; where a name is wanted, its sizes must be that model's."""
    if path.is_dir():
        config = huggingface_config(read_config(path), str(path))
        found = folder_tensors(path)
    elif path.is_file():
        file = open_gguf(path)
        config = gguf_config(file)
        found = gguf_tensors(file, config)
    else:
        raise ModelFileError(
            f"no model {path}", why="no named model, file or folder of that name", do="see `ridgeline models`, or check the path"
        )
    if wanted is not None and config != CONFIGS[wanted]:
        differing = [n for n in DecoderConfig.__dataclass_fields__ if getattr(config, n) != getattr(CONFIGS[wanted], n)]
        raise ModelFileError(f"{path} is not {wanted}", why=f"another {', '.join(differing)}", do="give the file of that model")
    with torch.device("meta"):
        model = LanguageModel(config)
    model.model.rotary_emb = RotaryEmbedding(config)  # computed, not stored: on the meta device it would be empty
    tensors = {n: t for n, t in found if not (config.tied and n == "lm_head.weight")}
    if config.tied and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    fill(model, tensors, str(path))
    if config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def fill(model: nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Put `tensors` into the model: the same names, the same shapes, finite numbers, nothing missing and nothing over."""
    wanted = model.state_dict()
    counters = {name for name in wanted if name.endswith("num_batches_tracked")}  # files older than torch 0.4.1 lack them
    missing, extra = sorted(wanted.keys() - tensors.keys() - counters), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        what = f"tensor {missing[0]} is missing from {origin}" if missing else f"tensor {extra[0]} in {origin} has no place in the model"
        raise ModelFileError(what, why=f"{len(missing)} are missing and {len(extra)} are over", do="give the weights of this very model")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape or tensor.is_floating_point() != wanted[name].is_floating_point():
            raise ModelFileError(
                f"tensor {name} in {origin} is {tensor.dtype} {list(tensor.shape)}",
                why=f"the model has {wanted[name].dtype} {list(wanted[name].shape)} there",
                do="give the weights of this very model",
            )
        if tensor.is_floating_point() and not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
            raise ModelFileError(f"tensor {name} in {origin} is not finite", why="it holds NaN or infinity", do="download it again")
    kept = {name: wanted[name] for name in counters - tensors.keys()}
    model.load_state_dict({**tensors, **kept}, assign=any(t.is_meta for t in wanted.values()))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file, or in a pickle that holds tensors and plain values only."""
    if not path.is_file():
        raise ModelFileError(f"no weights {path}", why="the file does not exist", do="check the path")
    if path.suffix == ".safetensors":
        return dict(_safetensors(path))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, and tells how to load the file with its guard off
        why = "it is no state dict of tensors and plain values: another kind of file, a damaged one, or one that would run code when loaded"
        raise ModelFileError(f"cannot read {path}", why=why, do="give model.state_dict() saved by torch.save, or safetensors") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in loaded.items()):
        raise ModelFileError(f"{path} holds no state dict", why="names with tensors are wanted", do="save model.state_dict()")
    return {name.removeprefix("module."): tensor for name, tensor in loaded.items()}  # "module.": saved inside DataParallel


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"cannot read {path}", why=first_line(error), do="download it again") from error


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a Hugging Face folder, as float32; rotary tables some old files hold are left out."""
    if not has_safetensors(folder):
        raise ModelFileError(f"{folder} holds no safetensors", why="pickled weights are never read", do="save the model as safetensors")
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    for file in files:
        yield from ((n, t.float()) for n, t in _safetensors(file) if not n.endswith("rotary_emb.inv_freq"))


def gguf_tensors(file: Gguf, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a GGUF file under its name in the module."""
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    interleaved = file.metadata["general.architecture"] == "llama"
    for name in file.tensors:
        if name == "rope_freqs.weight":  # already in the config
            continue
        tensor = file.tensor(name)
        place = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name)
        if place is None:
            stem, _, ending = name.rpartition(".")
            yield f"{outer.get(stem, stem)}.{ending}", tensor
            continue
        layer, part, ending = place.groups()
        if interleaved and part in ("attn_q", "attn_k") and tensor.size(0) % config.head_dim == 0:
            tensor = half_split(tensor, config.head_dim)
        yield f"model.layers.{layer}.{GGUF_NAMES.get(part, part)}.{ending}", tensor


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Rows in pairs (0, 1), (2, 3), … of one rotation to rows i and i + head_dim/2, head by head; [rows, …] in and out."""
    pairs: Tensor = rows.unflatten(0, (-1, head_dim // 2, 2))  # [heads, pair, which of the two, …]
    return pairs.transpose(1, 2).reshape(rows.shape)
