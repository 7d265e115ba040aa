"""How numba compiles and keeps kernels. Imports nothing of polygon."""
