"""Networks on memristor arrays, bit for bit: quantised and sliced operands, DACs, conductances, ADCs, shift-and-add.

x (…, M, K), w (K, N) ──numbers──> digits ──tiling──> one piece an array
    digits ──DAC──> levels ─┐
    digits ──cells─> levels ─┴─ column sums (integers) ──adc──> codes ──shift-add, scales──> out (…, M, N)
plan.py     what every engine must agree on            cells.py    weights as programmed, with all that goes wrong
noise.py    random numbers by counter                  wires.py    what resistance of the wires takes
engine/     how a product is computed: reference, blocked, native, fused
layer/      modules in the place of torch's: to_crossbar, calibration, training
study/      chips by the dozen, diagnosis, sweep
"""
