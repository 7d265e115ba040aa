"""Every uniform split of a number of devices into data, tensor, pipeline (and context, expert) parallelism, ranked.

`splits` enumerates, `evaluate` prices one split with the planner's cost model, `searcher` with the formula of an
earlier searcher, `grid` runs them in parallel; `__main__` is the command. May import `polygon.cost`, `polygon.domain`.
"""
