"""The same run on many devices: layouts, strategies and the agreement of ranks."""
