"""Measurements of polygon against its rivals and its bounds; users do not need them."""
