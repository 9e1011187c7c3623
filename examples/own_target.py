"""Describe a chip in TOML and ask what a model would take on it.

python examples/own_target.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import ridgeline

CHIP = """
version = 1
kind = "processor"
name = "two-tera"

[units.alu.peak_flops]
float16 = 2e12

[memories.dram]
bandwidth_bps = { value = 1, unit = "TB/s", source = "the example in the docs", status = "assumed" }
capacity_bytes = 80e9
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two-tera.toml"
        path.write_text(CHIP, encoding="utf-8")
        profile = ridgeline.estimate(ridgeline.capture("resnet50", dtype="float16"), str(path))
    first = profile.rows[0]
    arithmetic, memory = first.compute_s * 1e6, first.memory_s["dram"] * 1e6
    print(f"{first.layer}: {arithmetic:.1f} µs of arithmetic, {memory:.2f} µs of memory, {first.bottleneck} binds")


if __name__ == "__main__":
    main()
