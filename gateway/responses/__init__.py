"""OpenAI's Responses API: responses made from chats, stored and continued."""
