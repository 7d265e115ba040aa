"""Settings for all tests: no law depends on how fast the machine is."""

from hypothesis import settings

settings.register_profile("polygon", deadline=None)
settings.load_profile("polygon")
