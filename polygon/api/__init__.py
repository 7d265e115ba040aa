"""What Python programs call; `polygon` hands its names on. The commands and the page are thin layers over it.

The planner's own records (`polygon.domain`) are frozen data that know no planning. `Cluster`, `Model`, `Problem` and
`Plan` here each hold one of them as `data`, beside what they can do with it. May import all of polygon but the
commands and the page.

`Problem`, `Plan`, `Result`, `Front` and `Comparison` name one another in what they take and give (a problem's search
gives a result with a plan, which has its problem and can be compared), so their files import one another for types;
when a program runs, only `Plan.from_file` reaches back, to the problem that it reads.
"""
