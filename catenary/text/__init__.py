"""Token ids to text, for the gateway and for clients."""

from __future__ import annotations

from catenary.text.detokenizer import Detokenizer, WindowDetokenizer
from catenary.text.stop import StopScanner
from catenary.text.vocabulary import TokenizerTraits, Vocabulary

__all__ = [
    "Detokenizer",
    "StopScanner",
    "TokenizerTraits",
    "Vocabulary",
    "WindowDetokenizer",
]
