"""Search: which architecture, for which device.

space ──strategy──> candidate ──evaluate (a table; training comes next)──> Trial ──> Front, winner

So far: spaces of categorical choices, tables of finished trainings (NAS-Bench-201's form), four strategies over them.
"""
