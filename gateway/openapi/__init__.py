"""The OpenAPI document: derived from what the routes read and write, never written beside it."""
