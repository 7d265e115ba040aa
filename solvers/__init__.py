"""Metaheuristics and exact search over integer allocations, with stop rules. Knows nothing of GPUs; imports no other folder of this project."""
