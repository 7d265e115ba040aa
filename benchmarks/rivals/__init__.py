"""Other planners' objectives and file formats, so that plans can be compared on their terms as well as on ours.

May import `polygon.domain`, `polygon.formats.catalogue` and `solvers`; nothing else of polygon imports it but commands.
"""
