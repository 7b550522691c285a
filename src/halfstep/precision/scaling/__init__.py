"""Loss scaling: how the scale adapts, and how gradients are checked."""
