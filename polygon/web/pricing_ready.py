"""Imported once by the process from which those that price are forked: what all of them need is loaded."""

import gc

from polygon.web import pricing, questions, views

__all__ = ["pricing"]

small = questions.small_plan()
if small is not None:
    views.warm_up(*small)
gc.collect()
gc.freeze()  # what is loaded stays: the collector need not look at it again and again
