"""One training step of a small decoder, plain and with our kernels: the same loss, and what ran in place of torch's functions.

python examples/use_kernels.py        on a device without a measured table, a CPU for one, torch runs and nothing is replaced
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from ridgeline import use_kernels
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = 1024 if device == "cuda" else 32
    model = CausalLM(DecoderConfig(layers=2, hidden=256, intermediate=512, heads=4, kv_heads=4, vocab=1024, rope_theta=1e4)).to(device)
    ids, positions = torch.randint(1024, (4, tokens), device=device), torch.arange(tokens, device=device)

    def step() -> float:
        loss = cross_entropy(model(ids, positions).flatten(0, 1), ids.flatten())
        loss.backward()
        model.zero_grad()
        return loss.item()

    print(f"plain: loss {step():.4f}")
    with use_kernels() as kernels:  # every torch call in the block is looked up
        print(f"in a block: loss {step():.4f}, replaced: {kernels.report() or 'nothing, torch ran'}")
    kernels = use_kernels(model)  # the model's forward from now on, its patterns fused; the loss outside it stays torch's
    print(f"in the model: loss {step():.4f}, replaced: {kernels.report() or 'nothing, torch ran'}")
    kernels.undo()


if __name__ == "__main__":
    main()
