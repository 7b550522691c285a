"""What a format does to numbers: range, gaps, what becomes 0 or infinite, and what is lost."""
