"""Frozen data: cluster, model, batch, plan, the catalogues, and what is said of them. Imports nothing of polygon but
itself."""
