"""Metaheuristics over integer allocations: ants, genetic, annealing, restarts, exhaustive search.

A solver gets a `Problem`, a `numpy.random.Generator` and a stop rule, and returns a `Result`. The same seed gives the
same result as long as no wall-clock limit cuts the run short. No domain words, no global random state; imports numpy
and the standard library only.
"""
