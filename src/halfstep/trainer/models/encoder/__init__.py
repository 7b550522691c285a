"""A text classifier that is trained from scratch."""
