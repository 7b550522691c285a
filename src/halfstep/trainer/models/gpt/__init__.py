"""GPT-2 as a plain torch module, and reading and writing its Hugging Face folders."""
