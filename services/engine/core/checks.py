"""The core's own look at what would hurt it, whatever the servicer has let pass."""

from __future__ import annotations

from itertools import chain

from services.engine.link import CoreErrorCode, SubmitSequence
from services.engine.scheduler import SequenceRefused


def check_token_ids(message: SubmitSequence, vocab_size: int) -> None:
    """Raises SequenceRefused for an id that indexes no logit: a negative one would mean another's."""
    sampling = message.sampling
    lists = {
        "the sequence": message.token_ids,
        "stop_token_ids": message.stop_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "bad_words": list(chain.from_iterable(sampling.bad_words)),
        "allowed_token_ids": sampling.allowed_token_ids,
    }
    for name, ids in lists.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise SequenceRefused(
                CoreErrorCode.INVALID_ARGUMENT,
                f"a token id of {name} is outside the vocabulary of {vocab_size} tokens",
            )
