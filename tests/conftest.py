"""Settings for every test."""

from hypothesis import settings

# How long a case takes depends on what else the machine does, so no case has a deadline.
settings.register_profile("pilotage", deadline=None)
settings.load_profile("pilotage")
