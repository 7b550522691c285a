"""The drop-in for ``torch.amp.GradScaler``."""
