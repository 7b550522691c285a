"""Optimizer steps whose decisions are made on the device, so that the host never waits."""
