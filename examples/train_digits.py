"""Train a small network on handwritten digits, be stopped half-way, go on, and score it.

python examples/train_digits.py [float32 | bfloat16 | float16]
"""

from __future__ import annotations

import sys
import tempfile

import torch

from ridgeline.train.evaluate import evaluate
from ridgeline.train.fit import fit
from ridgeline.workload.data import load_data
from ridgeline.workload.models.digits_cnn import DigitsCNN


class PowerCut(Exception):
    """What ends the first attempt."""


def cut(model: torch.nn.Module, step: int) -> None:
    if step == 40:
        raise PowerCut


def main() -> None:
    precision = sys.argv[1] if len(sys.argv) > 1 else "float32"
    data = load_data("digits")
    with tempfile.TemporaryDirectory() as folder:
        for attempt, after_step in enumerate((cut, None)):
            torch.manual_seed(0)
            model = DigitsCNN()
            try:
                history = fit(
                    model, data, epochs=6, batch=64, learning_rate=0.05, warmup=10, precision=precision, clip=5.0,
                    checkpoint=folder, checkpoint_every=15, after_step=after_step, report=print, progress=False,
                )  # fmt: skip
            except PowerCut:
                print(f"attempt {attempt + 1} ended at step 40")
    scores = evaluate(model, data)
    print(f"{len(history)} steps at {history.samples_per_s:,.0f} samples/s, loss {history.loss[0]:.2f} to {history.loss[-1]:.2f}")
    print(f"accuracy {scores.accuracy:.1%} on {scores.count} digits it has not seen")


if __name__ == "__main__":
    main()
