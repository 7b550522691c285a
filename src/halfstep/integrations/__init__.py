"""halfstep inside other training stacks: ``torch.amp`` loops, Lightning, Hugging Face."""
