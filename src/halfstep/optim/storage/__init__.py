"""How weights and moments are stored, in low precision, between two steps."""
