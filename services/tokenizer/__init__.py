"""The tokenizer service: text to token ids and back."""

from __future__ import annotations
