"""The steps on text and chats."""
