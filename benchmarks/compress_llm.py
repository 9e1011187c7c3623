"""A language model's perplexity, file size and speed after each way of quantising its weights.

    GGUF ──> float32 model ──each variant: quantise, save, load again, bfloat16──> perplexity on --text, bytes, tokens/s
    python benchmarks/compress_llm.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2_raw_test.txt
        --calibration wikitext2_valid.txt [--tokens N] [--device cuda] [--variants bf16,int8,int4-rtn,int4-gptq]

Perplexity: windows of --context tokens that do not overlap, no begin-of-text token. Rise: over the bfloat16 model's.
Calibration text is another part of the corpus: its blank lines and <unk> marks are dropped, as the raw text has neither.
Tokens/s: one sequence, one token a pass at context 256 (graph: the pass as one CUDA graph), and the whole of the scoring pass,
first calls included.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import write_results
from torch import Tensor, nn

from ridgeline.measure.environment import machine_name
from ridgeline.train.evaluate import evaluate
from ridgeline.transform.quantise.grid import Grid, dequantise, quantise
from ridgeline.transform.quantise.weight_only import LayerRow, WeightSettings, quantise_weights_
from ridgeline.transform.saved import load_model, save_model
from ridgeline.workload.data import Split
from ridgeline.workload.data.text import windows
from ridgeline.workload.gguf import open_gguf
from ridgeline.workload.pretrained import load_pretrained
from ridgeline.workload.tokenizer import load_tokenizer

INT4: dict[str, Any] = {"bits": 4, "symmetric": False, "granularity": "group", "group": 64, "scale_type": "float16"}
VARIANTS: dict[str, WeightSettings | None] = {
    "bf16": None,
    "int8": WeightSettings(tables=True),
    "int4-rtn": WeightSettings(**INT4),
    "int4-gptq": WeightSettings(**INT4, algorithm="gptq"),
    "int4-gptq-clip": WeightSettings(**INT4, algorithm="gptq", clip=True),
    "int4-gptq-in-order": WeightSettings(**INT4, algorithm="gptq", act_order=False),
    "int4-awq": WeightSettings(**INT4, algorithm="awq"),
    "int4-gptq-int8-tables": WeightSettings(**INT4, algorithm="gptq", tables=True),
    "nf4": WeightSettings(**INT4, format="nf4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--calibration", required=True, type=Path)
    parser.add_argument("--tokens", type=int, default=0, help="tokens of --text to score; 0: all")
    parser.add_argument("--calibration-tokens", type=int, default=131_072)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=0, help="windows at once; 0: 16 on a GPU, 1 elsewhere")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--layers", action="store_true", help="a line for every layer in the results: some 70 KB a variant")
    parser.add_argument("--label", default=None, help="machine in the name of the results file; default: the device")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if unknown := set(options.variants.split(",")) - VARIANTS.keys():
        parser.error(f"unknown variants {sorted(unknown)}; there are {', '.join(VARIANTS)}")
    rows = [file_blocks(options.model), *compared(options)]
    label, machine = options.label or options.device, {"device": machine_name(options.device), "threads": torch.get_num_threads()}
    print(write_results("compress", "llm", label, machine, rows, options.out))


def file_blocks(path: Path) -> dict[str, Any]:
    """Whether group-32 asymmetric quantisation of the file's dequantised weights gives its own 4-bit blocks back."""
    file, grid = open_gguf(path), Grid(4, False, "group", 32, "minimum", "float16")
    blocks = same = values = 0
    for entry in file.tensors.values():
        if entry.kind != "Q4_1":
            continue
        codes, scale, minimum = file.raw_blocks(entry.name)
        assert minimum is not None
        weight = (scale.float()[..., None] * codes + minimum.float()[..., None]).flatten(1)  # [rows, columns]
        done = quantise(weight, grid, entry.name)
        assert done.zero is not None
        equal = (done.codes.reshape(codes.shape) == codes).all(2) & (done.scale == scale) & (done.zero == minimum)
        blocks, same = blocks + equal.numel(), same + int(equal.sum())
        values += int((dequantise(done) != weight).sum())
    row = {"variant": "file's own blocks, group 32", "blocks": blocks, "equal_blocks": same, "different_values": values}
    print(row, flush=True)
    return row


def compared(options: argparse.Namespace) -> list[dict[str, Any]]:
    coder = load_tokenizer(options.model)
    text = options.text.read_text(encoding="utf-8")
    ids = torch.tensor(coder.encode(text), dtype=torch.int64)
    split = windows(ids[: options.tokens or None], options.context, options.text, coder)
    calibration = calibration_windows(options, coder)
    original = load_pretrained(options.model)
    rows: list[dict[str, Any]] = []
    base = rtn = math.nan
    for variant in options.variants.split(","):
        row = {"variant": variant, **one(original, VARIANTS[variant], split, calibration, options)}
        base = row["perplexity"] if variant == "bf16" else base
        row["rise"] = row["perplexity"] - base
        row["rise_percent"] = 100 * row["rise"] / base
        rtn = row["rise"] if variant == "int4-rtn" else rtn
        row["rise_over_rtn"] = row["rise"] / rtn if variant.startswith("int4") else None
        rows.append({name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()})
        print({name: value for name, value in rows[-1].items() if name != "layers"}, flush=True)
    return rows


def calibration_windows(options: argparse.Namespace, coder: Any) -> list[tuple[Tensor]]:
    lines = (line.replace(" <unk>", "").rstrip("\n") for line in options.calibration.read_text(encoding="utf-8").splitlines())
    ids = torch.tensor(coder.encode("\n".join(line for line in lines if line.strip())), dtype=torch.int64)
    count = max(1, options.calibration_tokens // options.context)
    found = [ids[at : at + options.context] for at in range(0, len(ids) - options.context + 1, options.context)]
    spaced = found[:: max(1, len(found) // count)][:count]  # from all of the text, not its first article
    return [(torch.stack(spaced[at : at + 4]).to(options.device),) for at in range(0, len(spaced), 4)]


def one(
    original: nn.Module, settings: WeightSettings | None, split: Split, calibration: list[tuple[Tensor]], options: argparse.Namespace
) -> dict[str, Any]:
    """One variant, measured on the model as loaded from its file."""
    model = copy.deepcopy(original).to(options.device)
    started = time.perf_counter()
    layers: list[LayerRow] = [] if settings is None else quantise_weights_(model, settings, calibration)
    spent = time.perf_counter() - started
    model = model.to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model.cpu(), folder, base=original)
        stored = (Path(folder) / "model.safetensors").stat().st_size
        model = load_model(folder, base=lambda: copy.deepcopy(original), device=options.device)
    batch = options.batch or (16 if options.device == "cuda" else 1)
    started = time.perf_counter()
    scores = evaluate(model, split, batch=batch)
    seconds = time.perf_counter() - started
    packed = sum(row.runs_packed for row in layers)
    return {
        "settings": None if settings is None else settings.to_dict(), "perplexity": scores.perplexity,
        "perplexity_per_byte": scores.perplexity_per_byte, "tokens": scores.count, "file_bytes": stored, "quantise_s": spent,
        "scoring_tokens_per_s": scores.count / seconds, **decode_speed(model, options.device),
        "layers_packed": f"{packed} of {len(layers)} run packed",
        "mean_sqnr_db": sum(row.sqnr_db for row in layers) / len(layers) if layers else None,
        **({"layers": [row.to_dict() for row in layers]} if options.layers else {}),
    }  # fmt: skip


def decode_speed(model: nn.Module, device: str, context: int = 256, steps: int = 50) -> dict[str, Any]:
    """Tokens a second of one sequence, one token a pass, with a key-value cache of `context` positions."""
    parts: Any = model
    first = parts.model.layers[0].self_attn
    heads = first.k_proj.out_features // first.head_dim
    shape = (1, heads, context, first.head_dim)
    cache = [(torch.randn(shape, device=device).bfloat16(), torch.randn(shape, device=device).bfloat16()) for _ in parts.model.layers]
    token, position = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.full((1,), context - 1, device=device)

    def step() -> Tensor:
        out: Tensor = model(token, position, cache)
        return out

    with torch.inference_mode():
        run, how = (step, "eager") if device == "cpu" else _graph(step)
        for _ in range(3):
            run()
        _wait(device)
        started, done = time.perf_counter(), 0
        while done < steps and (device == "cuda" or time.perf_counter() - started < 5):
            run()
            done += 1
        _wait(device)
    return {"decode_tokens_per_s": done / (time.perf_counter() - started), "decode_mode": how}


def _graph(step: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """The pass as one CUDA graph: launches are most of a small model's time otherwise."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return step, f"eager; no graph: {str(error).splitlines()[0]}"
    return graph.replay, "graph"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
