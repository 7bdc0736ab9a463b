"""OpenAI's Responses API: made from chats, stored, gone on from."""
