"""What mixed precision saves, and what it does not: memory, traffic, time."""
