"""Where every intermediate tensor lives: lifetimes, offsets in one arena, a runner inside it, and fewer live bytes.

    Captured ──observe (one run)──> Facts ──lifetimes──> [Interval] ──plan──> Plan(offsets) ──StaticModule──> runs in one arena
                                      └──reorder, rematerialise: the same answers with a lower peak

facts.py  what one run shows             lifetimes.py  when storages live      plan.py, skyline.py  offsets
outs.py   ops that write where told     reuse.py  over what dies there        workspace.py  bytes an op allocates itself
steps.py, static.py  the runner         order.py  a better order              remat.py  compute again, under a budget
"""
