"""Measured runs, and how far predictions are from them. May import `cost` and `formats`."""
