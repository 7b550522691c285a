"""The precision policy that a user asks for: its value, its spelling, and its rules by module."""
