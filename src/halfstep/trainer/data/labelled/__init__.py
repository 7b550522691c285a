"""Labelled texts for classifiers."""
