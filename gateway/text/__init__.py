"""The models' tokenizers as the gateway uses them: files to decode with, and the services that render."""
