"""Both passes of a training step as one CUDA graph: one launch where a network of many small layers needs thousands.

    step 0 … WARM-1   plain, on a stream of its own: kernels are chosen and memory is taken
    step WARM         captured (not run): loss and gradients get fixed addresses
    from then on      batch ──copy──> fixed inputs ──replay──> fixed loss and gradients ──> clip, optimiser step, as ever

The optimiser, the rate, clipping and averaging stay outside, so nothing of a run's arithmetic changes. Gradients must not be set to
None once captured: each replay writes them anew. Batches all have one shape (feed.py gives only whole ones). A model whose forward
depends on values of its inputs, or that reads them back to the host, cannot be captured; torch says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import TrainError

WARM = 3
Passes = Callable[[Tensor, Tensor], Tensor]  # inputs, targets -> loss, gradients left in the parameters


class GraphedPasses:
    """Calls `passes`, from the fourth time on as a graph."""

    def __init__(self, passes: Passes, forget: Callable[[], None], device: torch.device) -> None:
        self.passes, self.forget, self.device = passes, forget, device
        cuda: Any = torch.cuda  # parts of it are untyped
        self.stream, self.seen = cuda.Stream(device), 0
        self.graph: Any = None
        self.inputs: Tensor | None = None
        self.targets: Tensor | None = None
        self.loss: Tensor | None = None

    @property
    def captured(self) -> bool:
        """Whether gradients have their fixed addresses."""
        return self.graph is not None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch."""
        if self.seen < WARM:
            self.seen += 1
            return self._plain(inputs, targets)
        if self.graph is None:
            self._capture(inputs, targets)
        assert self.inputs is not None and self.targets is not None and self.loss is not None
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()
        return self.loss.clone()  # the next replay writes over it before the history has read it

    def _plain(self, inputs: Tensor, targets: Tensor) -> Tensor:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss = self.passes(inputs, targets)
        current.wait_stream(self.stream)
        return loss

    def _capture(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs.clone(), targets.clone()
        self.forget()  # gradients made while capturing lie in the graph's own memory
        cuda: Any = torch.cuda
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph, stream=self.stream):
                self.loss = self.passes(self.inputs, self.targets)
        except RuntimeError as error:
            raise TrainError(
                "the passes could not be captured as a CUDA graph",
                why=str(error).splitlines()[0],
                do="train with graph=False; a model that reads values back to the host cannot be captured",
            ) from error
        self.graph = graph
