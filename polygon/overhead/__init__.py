"""Communication and memory of collectives and configurations, formula by formula.

The command `python -m polygon.overhead` and the functions behind it: `dimensions` (what every parallel dimension
sends), `analysis` (one configuration), `predefined` (the combinations of run-all). May import `polygon.cost` and
`polygon.domain`; only `__main__`, `report` and `plots` print, draw or write.
"""
