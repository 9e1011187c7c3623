"""Triton kernels behind torch operators, forward and backward, and their use in place of torch's.

    <op>.py: kernels, launcher, reference ──library.operator──> torch.ops.ridgeline.<op>      CUDA, CPU, Meta, Autograd
             launcher ──tuning.config──> block sizes, warps ──jit.launch──> the GPU, or the interpreter
             @replaces(op, F.x, …) ──replace.REPLACEMENTS──> use.use_kernels(): a torch call in a block or a model
                 worth(op, x, size)? tables/<device>-wins.json ──> ours, or torch's own
             BENCH = benchmark(Case(…)) ──bench/──> rows: time, share of the ceiling, against torch and others
    fuse.py: several calls that one kernel does, found in a model's modules

A new kernel is one file: `use.load_operators` imports all of this folder. Nothing is imported here, so that importing a single
operator's file loads no other. docs/kernels.md has a worked example.
"""
