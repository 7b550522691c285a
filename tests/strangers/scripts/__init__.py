"""Classic training scripts, written anew: small, plain torch, and none of them knows halfstep."""
