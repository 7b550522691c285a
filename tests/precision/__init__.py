"""Tests of halfstep.precision."""
