"""Pretrained models from Hugging Face folders, opened without trusting them."""
