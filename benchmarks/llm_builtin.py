"""Trains the language model that ships with Ridgeline, so that `ridgeline generate` and `serve` work at once anywhere.

    text ──byte-level BPE, trained on the training part alone──> ids ──overlapping windows──> fit + use_kernels, dropout
      ──every --score-every steps: loss on the validation part, the best weights are kept──> bfloat16 ──> loss on the test part
      ──> config.json, model.safetensors, tokenizer.json, tokenizer_config.json, training.json      (a Hugging Face folder)

python benchmarks/llm_builtin.py --text tinyshakespeare.txt [--steps N] [--device cuda] [--out src/ridgeline/llm/builtin]

The text is cut 90 / 5 / 5 in reading order. A blank line ends a speech and is a token of its own, the model's end of text. Losses:
windows of --context tokens that do not overlap, nats a token, and bits a byte, which does not depend on the vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from common import versions
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.files import write_json, write_text
from ridgeline.kernel.use import use_kernels
from ridgeline.measure.environment import machine_name
from ridgeline.train.evaluate import Scores, evaluate
from ridgeline.train.fit import fit
from ridgeline.workload.data import Data, Split
from ridgeline.workload.data.find import find_file
from ridgeline.workload.data.text import windows
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig
from ridgeline.workload.tokenizer import Tokenizer, load_tokenizer

HOME = Path(__file__).parents[1] / "src" / "ridgeline" / "llm" / "builtin"
SHAPE = {"layers": 6, "hidden": 128, "intermediate": 512, "heads": 4, "kv_heads": 2}
ROPE_THETA, MOST_BYTES = 1e4, 4_000_000
END_OF_SPEECH = "\n\n"
CHAT = (
    "{% for message in messages %}{% if message.role == 'user' %}ROMEO:\n{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}JULIET:\n{{ message.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}JULIET:\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=None, help="default: text/tinyshakespeare.txt under RIDGELINE_DATA")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--context", type=int, default=512, help="tokens of a training window, and the most the model is made for")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--score-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HOME)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    text = (options.text or find_file("text/tinyshakespeare.txt", "tinyshakespeare.txt", get="save tinyshakespeare.txt")).read_text("utf-8")
    train(options, text)


def train(options: argparse.Namespace, text: str) -> dict[str, Any]:
    """The whole run; what training.json says."""
    parts = cut(text)
    options.out.mkdir(parents=True, exist_ok=True)
    coder = train_tokenizer(parts["train"], options.vocab, options.out / "tokenizer.json")
    data, splits = splits_of(parts, coder, options.context)
    torch.manual_seed(options.seed)
    model = build(coder.size, options.dropout).to(options.device)
    kernels = use_kernels(model)
    curve: list[dict[str, float]] = []
    best = Best(model, splits["valid"], options.score_every, curve)
    started = time.perf_counter()
    history = fit(
        model, data, steps=options.steps, batch=options.batch, optimiser="adamw", learning_rate=options.rate, betas=(0.9, 0.95),
        weight_decay=0.1, decay="matrices", warmup=min(100, options.steps // 10), final=0.05, clip=1.0, seed=options.seed,
        precision="bfloat16" if options.device.startswith("cuda") else "float32", after_step=best.after_step,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    kernels.undo()
    for row in curve:
        row["train_loss"] = sum(history.loss[max(0, int(row["step"]) - 20) : int(row["step"])]) / min(20, int(row["step"]))
    stored = best.weights()
    save_model(stored, coder, options)
    found = {name: as_json(score(model, stored, splits[name])) for name in ("valid", "test")}
    result = {
        "schema": 1, "text": "tinyshakespeare, 90 / 5 / 5 in reading order", "parameters": sum(p.numel() for p in model.parameters()),
        "shape": {**SHAPE, "vocab": coder.size, "context": options.context}, "best_step": best.step, **found,
        "settings": {name: getattr(options, name) for name in ("steps", "batch", "context", "rate", "dropout", "seed")},
        "kernels": kernels.report(), "seconds": round(seconds, 1), "machine": machine_name(options.device), "versions": versions(),
        "curve": [{key: round(value, 4) for key, value in row.items()} for row in curve],
    }  # fmt: skip
    write_json(options.out / "training.json", result)
    size = sum(file.stat().st_size for file in options.out.iterdir() if file.is_file())
    print(json.dumps({**{key: value for key, value in result.items() if key != "curve"}, "bytes": size}))
    if size > MOST_BYTES:
        raise SystemExit(f"{size:,} bytes, at most {MOST_BYTES:,} are shipped")
    return result


def cut(text: str) -> dict[str, str]:
    """Training, validation and test part, in reading order, each ending with a speech."""
    ends = [text.index(END_OF_SPEECH, int(len(text) * share)) + len(END_OF_SPEECH) for share in (0.9, 0.95)]
    return {"train": text[: ends[0]], "valid": text[ends[0] : ends[1]], "test": text[ends[1] :]}


def train_tokenizer(text: str, vocab: int, path: Path) -> Tokenizer:
    """Byte-level BPE with a blank line as one token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    coder = Library(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    coder.train_from_iterator((speech + "\n" for speech in text.split(END_OF_SPEECH)), trainer)
    coder.add_tokens([AddedToken(END_OF_SPEECH, normalized=False)])
    write_text(path, coder.to_str())
    return load_tokenizer(path)


def splits_of(parts: dict[str, str], coder: Tokenizer, context: int) -> tuple[Data, dict[str, Split]]:
    """Windows that overlap by seven eighths to train on, and windows that do not to score."""
    ids = {name: torch.tensor(coder.encode(part), dtype=torch.int64) for name, part in parts.items()}
    pairs = ids["train"].unfold(0, context + 1, max(context // 8, 1))  # [N, context + 1], a view
    scored = {name: windows(ids[name], context, Path(name), coder) for name in ("valid", "test")}
    trained = Split(pairs[:, :-1].contiguous(), pairs[:, 1:].contiguous())
    return Data("tinyshakespeare", "tokens", coder.size, trained, scored["valid"]), scored


def build(vocab: int, dropout: float) -> CausalLM:
    """A decoder with small normal weights, and dropout after the embedding, each attention and each perceptron."""
    model = CausalLM(DecoderConfig(**SHAPE, vocab=vocab, rope_theta=ROPE_THETA, tied=True))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # what is added to the residual begins smaller, as there are two of them a layer (Radford 2019)
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * SHAPE["layers"]) if last else 0.02)

    def drop(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, dropout, module.training)

    for module in (model.model.embed_tokens, *(part for layer in model.model.layers for part in (layer.self_attn, layer.mlp))):
        module.register_forward_hook(drop)
    return model


class Best:
    """Scores the model every few steps and remembers the weights that did best."""

    def __init__(self, model: nn.Module, split: Split, every: int, curve: list[dict[str, float]]) -> None:
        self.split, self.every, self.curve = split, every, curve
        self.loss, self.step, self.state = math.inf, 0, copy.deepcopy(model.state_dict())

    def after_step(self, model: nn.Module, step: int) -> None:
        if (step + 1) % self.every:
            return
        loss = evaluate(model, self.split, batch=32).loss
        self.curve.append({"step": step + 1, "valid_loss": loss})
        print(f"step {step + 1}: validation {loss:.4f} nats/token" + (" *" if loss < self.loss else ""), flush=True)
        if loss < self.loss:
            self.loss, self.step, self.state = loss, step + 1, copy.deepcopy(model.state_dict())

    def weights(self) -> dict[str, Tensor]:
        """The best weights as they are stored: bfloat16, the tied output matrix once."""
        return {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in self.state.items() if name != "lm_head.weight"}


def score(model: nn.Module, stored: dict[str, Tensor], split: Split) -> Scores:
    """What the stored weights do, computed in float32: rounding to bfloat16 is in the number."""
    model.load_state_dict({**stored, "lm_head.weight": stored["model.embed_tokens.weight"]})
    return evaluate(model, split, batch=32)


def as_json(scores: Scores) -> dict[str, float]:
    assert scores.text_bytes is not None
    return {
        "nats_per_token": round(scores.loss, 4),
        "bits_per_byte": round(scores.nll_sum / scores.text_bytes / math.log(2), 4),
        "tokens": scores.count,
    }


def save_model(stored: dict[str, Tensor], coder: Tokenizer, options: argparse.Namespace) -> None:
    end = coder.encode(END_OF_SPEECH)[0]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": coder.size, "hidden_size": SHAPE["hidden"],
        "num_hidden_layers": SHAPE["layers"], "num_attention_heads": SHAPE["heads"], "num_key_value_heads": SHAPE["kv_heads"],
        "head_dim": SHAPE["hidden"] // SHAPE["heads"], "intermediate_size": SHAPE["intermediate"], "hidden_act": "silu",
        "max_position_embeddings": options.context, "rms_norm_eps": 1e-5, "rope_theta": ROPE_THETA, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": end,
    }  # fmt: skip
    write_json(options.out / "config.json", config)
    write_json(options.out / "tokenizer_config.json", {"eos_token": END_OF_SPEECH, "chat_template": CHAT})
    save_file(stored, options.out / "model.safetensors", metadata={"format": "pt"})
    (options.out / "model.safetensors").chmod(0o644)  # the library makes files that only their owner may read


if __name__ == "__main__":
    main()
