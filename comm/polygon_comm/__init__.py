"""Communication over slow links, in torch: streams, compression, reduction, local updates.

The folder is `comm/`, the package `polygon_comm`: Jupyter owns the top-level name `comm`.
Imports torch and nothing else of this project.
"""
