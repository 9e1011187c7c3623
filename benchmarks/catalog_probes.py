"""Put the probes of a calibration into a catalog file, so that machines without the device predict with them too.

ridgeline calibrate cuda                                     on the device: writes CACHE/targets/cuda-….toml
python benchmarks/catalog_probes.py CACHE/targets/cuda-….toml h200      replaces `probes` in catalog/h200.toml
"""

from __future__ import annotations

import argparse
import re
from importlib import resources
from pathlib import Path

from ridgeline.core.files import write_text
from ridgeline.target.load import load_file
from ridgeline.target.spec import Probe


def line(probe: Probe) -> str:
    """One probe as an inline table, times to four digits."""
    fields = [
        f'family = "{probe.family}"',
        f'dtype = "{probe.dtype}"',
        f"flops = {probe.flops}",
        f"read_bytes = {list(probe.read_bytes)}",
        f"write_bytes = {probe.write_bytes}",
        f"matmul = {list(probe.matmul)}" if probe.matmul else "",
        f"taps = {probe.taps}" if probe.taps > 1 else "",
        f"seconds = {probe.seconds:.3e}",
        f"host_s = {probe.host_s:.3e}" if probe.host_s is not None else "",
    ]
    return "  { " + ", ".join(f for f in fields if f) + " },"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("name", help="catalog target to update")
    options = parser.parse_args()
    spec = load_file(options.calibration)
    with resources.as_file(resources.files("ridgeline.target") / "catalog" / f"{options.name}.toml") as path:
        text = re.sub(r"(?m)^(# single ops.*\n)?probes = \[\n(  .*\n)*\]\n(machine = .*\n)?", "", path.read_text(encoding="utf-8"))
        machine = ", ".join(f'{key} = "{value}"' for key, value in spec.machine.items())
        block = "\n".join(
            ["# single ops timed by `ridgeline calibrate cuda`", "probes = [", *map(line, spec.probes), "]", f"machine = {{ {machine} }}"]
        )
        head, tail = text.split("\n[", 1)  # plain keys come before the first table
        write_text(path, f"{head.rstrip()}\n{block}\n\n[{tail}")
        print(f"{path.name}: {len(load_file(path).probes)} probes")


if __name__ == "__main__":
    main()
