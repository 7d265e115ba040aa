"""The planner: from cluster, model and batch to a plan with a predicted step time.

May import `solvers`, numpy, scipy, numba and networkx; never torch, `runners` or `polygon_comm`.
"""

from polygon.kernel_cache import ensure_kernel_cache

__version__ = "0.1.0"

ensure_kernel_cache()
