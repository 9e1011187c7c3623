"""Architecture search by gradient: alternating steps, guards against collapse, device terms, and the aso-se cycle.

search.search_differentiable(space, data, …) ──> Searched(point, history, stopped)
cycle.run_cycles(space, data, …) ──> Grown(model, genotype, phases)
"""
