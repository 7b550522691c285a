"""The drop-in replacement for ``torch.amp.GradScaler``."""
