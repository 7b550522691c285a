"""Steps that went wrong, kept whole so that they can be taken again."""
