"""Shipped facts: devices, models and links by name, each number with its source (YAML files of this folder)."""
