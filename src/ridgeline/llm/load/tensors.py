"""The tensors of a model file, each read when it is asked for.

    Tensors(readers {name: () -> Tensor}, shapes {name: shape}, origin)[name] ──read, check──> Tensor

A mapping, so that nothing is held but what is asked for: loading takes the memory of the model and one product more. Names are
Hugging Face's. What is no plain float (quantised codes, 8-bit floats that need scales) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.errors import ModelFileError
from ...workload.huggingface_config import first_line

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Tensors(Mapping[str, Tensor]):
    """Name → tensor, read anew at each look."""

    readers: Mapping[str, Callable[[], Tensor]]
    shapes: Mapping[str, tuple[int, ...]]
    origin: str

    def __getitem__(self, name: str) -> Tensor:
        reader = self.readers[name]
        try:
            tensor = reader()
        except (OSError, ValueError, RuntimeError) as error:  # the file changed under us, or its disk fails
            raise ModelFileError(f"cannot read {name} in {self.origin}", why=first_line(error), do="download it again") from error
        if tensor.dtype not in PLAIN:
            raise ModelFileError(
                f"tensor {name} in {self.origin} is {tensor.dtype}", why="plain floats are read", do="give the model unquantised, or GGUF"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.readers
