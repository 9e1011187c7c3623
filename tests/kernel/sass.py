"""Machine code of a kernel for a Hopper GPU, without one.

@jit kernel, signature {argument: "*fp32" | "i32" | …}, constants ──triton.compile for sm_90──> cubin ──nvdisasm──> Code(text, …)
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Code:
    """Disassembly and what the assembler said of it."""

    text: str
    spills: int
    """Loads and stores of registers that did not fit (LDL, STL)."""
    registers: int
    shared: int
    ir: str
    """Triton's own code, before it is one for a GPU."""

    def count(self, opcode: str) -> int:
        """Instructions whose mnemonic matches a regular expression, e.g. r"LDG\\.E\\.128"."""
        return len(re.findall(opcode, self.text))


def compiled(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], *, num_warps: int = 4, num_stages: int = 3,
             aligned: tuple[str, ...] = ()) -> Code:  # fmt: skip
    """Compile for sm_90; `aligned` arguments (pointers, sizes) are known to be multiples of 16, as Triton finds at launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    whole = {name: signature.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=whole, constexprs=values, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages})
    return _disassembled(built)


def _disassembled(built: Any) -> Code:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        text = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([tools / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", usage).group(1))  # type: ignore[union-attr]
    return Code(text, len(re.findall(r"\b(?:LDL|STL)\b", text)), registers, built.metadata.shared, str(built.asm["ttir"]))
