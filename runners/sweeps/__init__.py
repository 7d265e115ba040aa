"""What `python -m runners.sweep` is made of: suites of instances and methods, and their reports.

May import polygon and solvers; never torch or polygon_comm. The rivals' methods are those of `benchmarks` in the
checkout, which no installation knows: they are found from wherever a sweep is started.
"""

import sys
from pathlib import Path

_root = str(Path(__file__).resolve().parents[2])
if _root not in sys.path:
    sys.path.append(_root)
