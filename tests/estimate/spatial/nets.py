"""A network of three small layers and an array of 2 x 2 PEs: what the tests of the user-facing half map.

workload() ──> conv 2 → 4, conv 4 → 4 (stride 2), linear 36 → 3; a pool on the host       array() ──> "two-by-two"
NET, ARRAY ──> the same for the command line: file.py:function, and the text of a .toml file
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.estimate.spatial.network import NetworkMapping, map_layers
from ridgeline.target.array import SpatialArraySpec
from ridgeline.workload.capture import capture
from ridgeline.workload.graph import Workload
from tests.estimate.spatial import tiny_net

NET = f"{Path(tiny_net.__file__)}:build"
ARRAY = """
version = 1
kind = "array"
name = "two-by-two"
clock_hz = 1e8
axes = { columns = 2, rows = 2 }
bits = { W = 8, I = 8, O = 24, F = 8 }
[mac]
energy_pj = 0.2
area_mm2 = 0.001
static_w = 1e-6
[memories.registers]
operands = ["W", "O"]
capacity_bits = 64
read_pj = 0.05
write_pj = 0.05
access_bits = 8
[memories.registers.ports]
read = { direction = "read", bits_per_cycle = 32, word_bits = 8 }
write = { direction = "write", bits_per_cycle = 32, word_bits = 8 }
[memories.buffer]
operands = ["W", "I", "O"]
shared_over = ["columns", "rows"]
capacity_bits = { value = 1, unit = "Kib" }
read_pj = 2
write_pj = 2
access_bits = 32
area_mm2 = 0.02
[memories.buffer.ports]
read = { direction = "read", bits_per_cycle = 32, word_bits = 8 }
write = { direction = "write", bits_per_cycle = 32, word_bits = 8 }
[memories.dram]
operands = ["W", "I", "O"]
shared_over = ["columns", "rows"]
capacity_bits = { value = 1, unit = "Mib" }
read_pj = 100
write_pj = 100
access_bits = 32
[memories.dram.ports]
channel = { direction = "read_write", bits_per_cycle = 8 }
"""


def array(**changes: Any) -> SpatialArraySpec:
    """The array with some of its top-level fields changed."""
    return SpatialArraySpec.model_validate(tomllib.loads(ARRAY) | changes)


@cache
def workload(factory: str = "build") -> Workload:
    module, inputs = getattr(tiny_net, factory)()
    return capture(module.eval(), inputs, name="tiny")


@cache
def mapped(objective: str = "edp", dataflow: str = "any") -> NetworkMapping:
    return map_layers(workload(), array(), objective=objective, dataflow=dataflow)
