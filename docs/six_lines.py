"""README's six lines: plan seven data centers for GPT-3 1.3B, and draw the plan; `make wheel` runs them."""

from polygon import Batch, Cluster, Problem

cluster = Cluster.from_yaml("instances/ptafm-7dc.yaml")
result = Problem(cluster, "gpt3-1.3b", Batch(global_batch=1024, seq_len=2048)).search(effort="quick")
print(result.plan.describe())
result.plan.plot_timeline().savefig("timeline.png")
