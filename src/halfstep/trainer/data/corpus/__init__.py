"""Text for language models: documents, token files and batches."""
