"""Loss scaling: how the scale adapts, how it is calibrated, and how gradients are checked."""
