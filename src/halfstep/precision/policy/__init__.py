"""What is asked for: the policy as a value, its spelling, and its rules by module."""
