"""The tasks of runs: language models from text, classifiers, fine-tuning, a user's own module."""
