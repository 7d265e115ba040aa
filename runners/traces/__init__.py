"""PyTorch Profiler traces: recorded by each rank, read, broken down and shown.

May import `polygon`; only `record` imports torch.
"""
