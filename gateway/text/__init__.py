"""Tokenizers of the models as the gateway uses them: files to decode with, and the services that render."""
