"""What a plan costs: compute, collectives, memory, schedule, estimate, bounds. Pure functions of `polygon.domain`."""
