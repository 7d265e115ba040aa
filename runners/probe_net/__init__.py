"""The probe's parts: measuring a link by plain sockets, fitting what was measured, naming what is wrong with a network.

May import `polygon`; plain sockets, no torch.
"""
