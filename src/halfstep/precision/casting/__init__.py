"""How tensors change format on their way through a model."""
