"""Imported last by the server that ranks are forked from: what it has loaded is no longer looked through.

Every process that is forked would otherwise spend 0.2 CPU-seconds, and copy what it looks at, each time that Python
collects the garbage among the 360,000 objects of torch and scipy.
"""

import gc

gc.collect()
gc.freeze()
