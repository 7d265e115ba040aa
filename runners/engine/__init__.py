"""What one rank does to train under a plan: layers, data, schedule, reduction, log.

May import `polygon` and `polygon_comm`.
"""
