"""How much a sequence may bring: one table for the gateway, the router, the tokenizer and the engine.

Limits of the contract are fixed, and each peer relies on them. The others have a row (`Limit`): the defaults
of the options of gateway and engine, and what the router takes, which has no option. The router's bounds are
higher: they limit what a client of its own API can make it keep. The ranges of sampling parameters are in
`catenary/parameters.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_TOP_LOGPROBS: Final = 20
"""Most alternatives that a sequence may ask for with each token (`ResponseOptions`)."""

MAX_BEAM_WIDTH: Final = MAX_TOP_LOGPROBS // 2
"""Most beams of a `BeamSearch`: twice as many tokens of each are looked at."""

MAX_CACHE_SALT: Final = 128
"""Longest `SequenceSpec.cache_salt`, in characters."""

MAX_CONSTRAINT_BYTES: Final = 128 * 1024
"""Longest `Constraint.source`, in bytes of UTF-8."""

MAX_CONSTRAINT_AFTER: Final = 256
"""Longest `Constraint.after`, in characters."""

MAX_TENANT: Final = 128
"""Longest name of a tenant, in characters."""

MAX_NAME: Final = 256
"""Longest name of a model, a session or an instance, in characters."""

MAX_TRACEPARENT: Final = 128
"""Longest `SequenceSpec.traceparent`, in characters."""

MAX_SEQUENCE_ID: Final = 256
"""Longest `SequenceSpec.request_id` that an engine takes, in characters. The router takes 128."""

# More than any vocabulary has.
_ANY_VOCABULARY: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, inclusive. gateway, engine: default of the option; router: fixed. 0: no limit there."""

    gateway: int = 0
    router: int = 0
    engine: int = 0


CHOICES: Final = Limit(gateway=16)
"""`n` of a request."""
STOP_LENGTH: Final = Limit(gateway=512)
"""Characters of a stop string, which only the gateway knows."""
STOP_TOKEN_IDS: Final = Limit(gateway=64, router=1024, engine=64)
LOGIT_BIAS: Final = Limit(gateway=1024, router=_ANY_VOCABULARY, engine=1024)
"""Tokens with a bias."""
ALLOWED_TOKEN_IDS: Final = Limit(gateway=16_384, router=_ANY_VOCABULARY)
BAD_WORDS: Final = Limit(gateway=128, router=_ANY_VOCABULARY, engine=256)
"""In the engine more than in the gateway, which sends a word with and without a space before it. The router
counts their tokens too."""
BAD_WORD_LENGTH: Final = Limit(gateway=128)
"""Characters of a word."""
BAD_WORD_TOKENS: Final = Limit(engine=32)
"""Tokens of a word."""
SCORED_PROMPT_TOKENS: Final = Limit(gateway=262_144)
"""Prompt tokens with log probabilities in one answer."""
BEAM_WIDTH: Final = Limit(router=MAX_BEAM_WIDTH, engine=8)
BEAM_NUMBERS: Final = Limit(engine=1 << 20)
"""Tokens, log probabilities and alternatives of the hypotheses of a beam search."""
