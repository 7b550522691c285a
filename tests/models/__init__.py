"""Tests of halfstep.models."""
