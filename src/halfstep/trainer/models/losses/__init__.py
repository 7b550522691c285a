"""Losses, and the regions of a model that stay in fp32."""
