"""How a product on a chip is computed; all give the same ADC codes.

choose.py      which one, and why
reference.py   the oracle: everything at once, int64 to the ADC and float64 after it; for small sizes
blocked.py     plain torch, anything on any device, in bounded memory (patches, packing, array_sums)
native.py      C compiled on the spot, for CPUs (native_*)
fused.py       two Triton kernels, for GPUs (fused_*)
"""
