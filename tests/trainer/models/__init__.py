"""Tests of halfstep.trainer.models."""
