"""Compress a small network: train it, prune, distil and quantise it by a recipe, save it, load it again, and compare the answers.

Prints the table of the recipe's Change, then "the file gives the same answers".
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ridgeline.train.evaluate import evaluate
from ridgeline.train.fit import fit
from ridgeline.transform.recipe import load_recipe, run_recipe
from ridgeline.transform.saved import load_model, save_model
from ridgeline.transform.step import Context
from ridgeline.workload.data import load_data


def main() -> None:
    data = load_data("digits")
    model = load_model("digits-cnn").requires_grad_(True)
    fit(model, data, epochs=8, batch=64, optimiser="adamw", learning_rate=3e-3, progress=False)

    small, change = run_recipe(model.eval(), load_recipe("small"), Context(data=data, name="digits-cnn"))
    print(change.table())

    with tempfile.TemporaryDirectory() as folder:
        save_model(small, folder, base="digits-cnn", change=change)
        size = (Path(folder) / "model.safetensors").stat().st_size
        loaded = load_model(folder)
    images = data.prepare(data.test.inputs)
    with torch.no_grad():
        same = torch.equal(loaded(images), small(images))
    print(f"{size:,} bytes, accuracy {evaluate(loaded, data).accuracy:.2%}; the file gives {'the same' if same else 'OTHER'} answers")


if __name__ == "__main__":
    main()
