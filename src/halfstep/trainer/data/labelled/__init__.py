"""Labelled texts for classifiers: reading, splitting, encoding and batching them."""
