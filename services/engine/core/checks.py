"""The core's own look at what would hurt it, whatever the servicer has let pass."""

from __future__ import annotations

from itertools import chain
from math import isfinite

from services.engine.domain import BeamOptions, CoreErrorCode
from services.engine.link import SubmitSequence
from services.engine.scheduler import SequenceRefused


def check_beams(options: BeamOptions, message: SubmitSequence, max_width: int) -> None:
    """Raises SequenceRefused for a beam search that is malformed or wider than the engine takes."""
    if not 1 <= options.width <= max_width:
        raise _invalid(f"a search of {options.width} beams is outside 1 to {max_width} (max_beam_width)")
    if not 1 <= options.results <= options.width:
        raise _invalid(f"{options.results} results of {options.width} beams")
    if not isfinite(options.length_penalty):
        raise _invalid("length_penalty is not a number")
    if message.prompt_len != len(message.token_ids):
        raise _invalid("a beam search emits nothing that it could be resumed with")


def _invalid(text: str) -> SequenceRefused:
    return SequenceRefused(CoreErrorCode.INVALID_ARGUMENT, text)


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
