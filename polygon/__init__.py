"""The planner: from cluster, model and batch to a plan with a predicted step time.

May import `solvers`, numpy, scipy, numba and networkx; never torch, `runners` or `polygon_comm`.
"""

import sys

from polygon.interrupts import say_interrupted

if sys.argv[:1] == ["-m"]:  # `python -m polygon.COMMAND`, before Python has found the command
    sys.excepthook = say_interrupted

from polygon.kernel_cache import ensure_kernel_cache  # takes a tenth of a second to import

__version__ = "0.1.0"

ensure_kernel_cache()
