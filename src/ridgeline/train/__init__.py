"""One training loop that everything else uses, and one scorer.

    fit(model, data, …) in fit.py ──> loop.py: one step after another
      options.py  what can be asked, checked       seeds.py      order, crops and dropout from (seed, step)
      feed.py     batches onto the device          precision.py  autocast, loss scale, what stops a run
      optimiser.py, loss.py, heads.py, freeze.py   recompute.py  activations computed again
      parallel.py torchrun                         checkpoint.py whole or absent, resumes bit by bit
      history.py, progress.py, flops.py            what happened, and how fast
    evaluate(model, data) in evaluate.py           stability_report(model, data) in stability.py

Nothing is imported here, so that `ridgeline --help` stays fast.
"""
