"""How weights and moments are stored between two steps."""
