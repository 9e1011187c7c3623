"""Runs: a strategy, a trainer and a device, in a folder that survives being killed.

request ──> ask ──costs, limits──> train on a part of the training split ──> tell ──> front ──> the winner trained, tested once, exported
"""
