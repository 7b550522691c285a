"""Tensor parallelism: every rank holds, and computes with, a part of each layer."""
