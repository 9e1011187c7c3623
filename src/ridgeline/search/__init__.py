"""Search: which architecture, for which device.

    spaces/ ──strategies.py──> point ──study/: trained by recipe.py, costed on the target──> Trial ──> front, winner, trained and exported
    spaces/ ──supernet/──> one network of all ops ──differentiable/: gradients of the architecture, growth──> point
    latency/  tables of what a block costs on a device        table.py, run.py  strategies over tables of finished trainings
    grow.py   wider, deeper, branch: the function kept        proxies.py        scores without training

Nothing is imported here, so that `ridgeline --help` stays fast.
"""
