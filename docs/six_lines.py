"""Plan seven data centers for GPT-3 1.3B, and draw the plan."""

from polygon import Batch, Cluster, Problem

cluster = Cluster.from_yaml("instances/ptafm-7dc.yaml")
result = Problem(cluster, "gpt3-1.3b", Batch(global_batch=1024, seq_len=2048)).search(effort="quick")
print(result.plan.describe())
for name in ("map", "stages", "timeline"):
    getattr(result.plan, f"plot_{name}")().savefig(f"{name}.png")
