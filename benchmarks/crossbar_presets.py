"""What the catalog's chips do to ResNet-20 on CIFAR-10, and the same chips with one thing changed.

    preset, changes ──evaluate_chips──> row: digital, built perfectly, each chip, mean, std, worst, energy of an image

python benchmarks/crossbar_presets.py [--images 500] [--chips 4]

Data: RIDGELINE_DATA, with cifar10_*.npy and vision/resnet20*.th. ADC ranges from 256 training images; noise of every kind the file states.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import write_results

from ridgeline.crossbar.layer.convert import changed_chip
from ridgeline.crossbar.study.chips import evaluate_chips
from ridgeline.measure.environment import machine_name
from ridgeline.target.load import load_crossbar
from ridgeline.workload.data import load_data
from ridgeline.workload.pretrained import load_pretrained

CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("rram-64", "", {}),
    ("rram-64", "without stuck cells", {"stuck_high": 0.0, "stuck_low": 0.0}),
    ("rram-64", "two's complement, slices 1, 1, 2, 2, 2",
     {"sign": "slice", "x_slices": [1, 1, 2, 2, 2], "w_slices": [1, 1, 2, 2, 2], "x_bits": 8, "w_bits": 8}),
    ("rram-128", "", {}),
    ("pcm-128", "", {}),
    ("pcm-128", "drift not compensated", {"drift_compensated": False}),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--chips", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    data, model, rows = load_data("cifar10"), load_pretrained("resnet20"), []
    for name, change, fields in CASES:
        chip = load_crossbar(name)
        chip = changed_chip(chip, fields, name) if fields else chip
        found = evaluate_chips(model, chip, data, chips=options.chips, images=options.images, progress=False)
        row = {
            "chip": name, "change": change, "images": options.images, "digital": found.digital, "perfect": found.ideal,
            "accuracies": list(found.accuracies), "mean": found.mean, "std": found.std, "worst": found.worst,
            "energy_j": found.cost.energy_j if found.cost else None,
        }  # fmt: skip
        rows.append(row)
        print(f"{name:9} {change:40} {100 * row['perfect']:.1f} % {100 * row['mean']:.1f} ± {100 * row['std']:.1f} %", flush=True)
    machine = {"device": machine_name("cpu"), "threads": torch.get_num_threads()}
    print(write_results("crossbar", "presets", "cpu", machine, rows, options.out))


if __name__ == "__main__":
    main()
