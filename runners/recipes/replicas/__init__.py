"""Training with whole models on every rank (torch's DDP) or with DeepSpeed's ZeRO: what its backends have in common.

`whole` is the model, `loop` the steps and the log, `state` what memory holds; `ddp` and `zero` make a replica.
"""
