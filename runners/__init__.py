"""Programs that run plans: dist_runner, launcher, lab, probe, profiler, sweeps.

May import `polygon` and `polygon_comm`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

# In a checkout that is not installed, `python -m runners.x` sees the packages at the root but not the one in comm/.
if find_spec("polygon_comm") is None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "comm"))
