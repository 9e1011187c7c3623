"""Networks on memristor arrays, bit for bit: quantised and sliced operands, DACs, conductances, ADCs, shift-and-add.

x (…, M, K), w (K, N) ──numbers──> digits ──tiling──> one piece an array
    digits ──DAC──> levels ─┐
    digits ──cells─> levels ─┴─ column sums (integers) ──adc──> codes ──shift-add, scales──> out (…, M, N)
reference.py   the oracle: all of it at once, integers to the ADC and float64 after it; for small sizes
"""
