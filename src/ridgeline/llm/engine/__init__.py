"""Requests in, tokens out: the scheduler plans a step, the runner computes it, the engine keeps the books."""
