"""Measures precision policies side by side: who takes turns, what they cost, which one to take."""
