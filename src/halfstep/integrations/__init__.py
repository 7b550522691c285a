"""halfstep inside other training stacks: the drop-in for ``torch.amp.GradScaler``."""
