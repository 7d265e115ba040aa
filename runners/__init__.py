"""Programs that run plans: dist_runner, launcher, lab, probe, profiler, sweeps.

May import `polygon` and `polygon_comm`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

# In a checkout that is not installed, `python -m runners.x` sees the packages at the root but not the one in comm/.
if find_spec("polygon_comm") is None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "comm"))

# Every rank would print torch's warnings that names cannot be looked up, which hosts of a lab have none of.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
