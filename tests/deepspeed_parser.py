"""What the installed DeepSpeed's own parser reads in configurations, in a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.patience import PATIENCE_S

READ = """
import json, os, sys, warnings
os.environ["DS_BUILD_OPS"] = "0"
warnings.simplefilter("ignore")
from deepspeed.runtime import config
class Ranks:
    world = 1
    def get_rank(self): return 0
    def get_world_size(self, *a, **k): return self.world
config.dist = Ranks()
for replicas, data in json.loads(sys.stdin.read()):
    config.dist.world = replicas
    parsed = config.DeepSpeedConfig(data)
    zero = parsed.zero_config
    print("READ", json.dumps({
        "train_batch_size": parsed.train_batch_size, "stage": int(zero.stage), "optimizer": parsed.optimizer_name,
        "hierarchical": zero.zero_hpz_partition_size, "quantized_weights": zero.zero_quantized_weights,
        "quantized_gradients": zero.zero_quantized_gradients,
    }))
"""


def read_by_deepspeed(configs):
    """What DeepSpeed understands of every (number of replicas, configuration); skips where it is not installed."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (pip install -e .[deepspeed])")
    ran = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(configs), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line.removeprefix("READ ")) for line in ran.stdout.splitlines() if line.startswith("READ ")]
