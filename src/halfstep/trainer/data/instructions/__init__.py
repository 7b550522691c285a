"""Instructions and chats for language models: reading, writing in templates, packing into rows."""
