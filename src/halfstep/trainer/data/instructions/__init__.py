"""Instructions and chats for language models."""
