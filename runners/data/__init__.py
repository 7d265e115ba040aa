"""From files to training samples: token files, documents, mixtures, and the order in which they are read.

Uses the planner's models and errors; the engine and the recipes use it, never the other way round.
"""
