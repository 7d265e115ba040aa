"""Recipes: what to train, on what data, split how, in one YAML file each; `runners.train` runs them.

`schema` is what a file may say, `models` and `data` turn its words into a model and samples, `backends` train. May
import `polygon`, `polygon_comm` and `runners.engine`; torch only inside what runs on a rank.
"""
