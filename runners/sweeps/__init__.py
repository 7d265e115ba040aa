"""What `python -m runners.sweep` is made of: suites of instances and methods, and their reports.

May import polygon and solvers; never torch or polygon_comm.
"""
