"""Compiled CPU kernels: how they are built, and those of forward and backward passes."""
