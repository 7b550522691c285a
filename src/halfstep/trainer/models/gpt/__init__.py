"""GPT-2, and its folders in Hugging Face's form."""
