"""What Python programs call; `polygon` hands its names on. The commands and the page are thin layers over it.

The planner's own records (`polygon.domain`) are frozen data that know no planning. `Cluster`, `Model`, `Problem` and
`Plan` here each hold one of them as `data`, beside what they can do with it. May import all of polygon but the
commands and the page.
"""
