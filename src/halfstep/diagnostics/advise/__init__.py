"""Advises which formats a model's linear layers tolerate: error, cost, choice and proof."""
