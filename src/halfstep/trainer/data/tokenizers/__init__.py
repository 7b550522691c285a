"""Tokenizers: trained on a corpus, or read from files."""
