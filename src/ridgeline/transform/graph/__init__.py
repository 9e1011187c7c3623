"""Rewrite a model's graph, keep its answers, plan its memory.

    nn.Module + inputs ──capture──> Captured (fx graph of aten ops) ──manager.run_passes──> the same graph, smaller
                                                                         │ every pass: edit, then check.py
                                                                         ▼
                                                        PassReport: changed, refused, error found, seconds

capture.py  module in, graph out        manager.py  order, rounds, reports      check.py  the answers before and after
edit.py     what every pass needs       passes/     one file a pass             layout/, memory/   regions and arenas
"""
