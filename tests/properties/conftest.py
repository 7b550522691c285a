"""Hypothesis tries the same examples on every run, and keeps no files."""

from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")
