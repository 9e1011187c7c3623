"""Choose between the plain order (NCHW) and channels-last, region by region; the pass is `passes/layout.py`."""
