"""Frozen data: cluster, model, batch, plan, and the catalogues. Imports nothing of polygon but itself."""
