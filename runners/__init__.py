"""Programs that run plans: dist_runner, launcher, lab, probe, profiler, sweeps. May import `polygon` and `polygon_comm`."""
