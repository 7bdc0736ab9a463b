"""Making a plan: the checks that need the model and the rendered prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from catenary.text import Vocabulary
from catenary.v1 import common_pb2
from gateway.errors import bad_request, context_length_exceeded
from gateway.generation.plan import GenerationPlan
from gateway.generation.priorities import Standing
from gateway.parsing.choice import ParserChoice
from gateway.schemas.generation import GenerationFields
from gateway.text.models import Model


def make_plan(
    *,
    request_id: str,
    model: Model,
    prompts: Sequence[Sequence[int]],
    fields: GenerationFields,
    default_max_tokens: int | None,
    param: str,
    cache_salt: str,
    constraint: common_pb2.Constraint | None = None,
    constraint_param: str | None = None,
    standing: Standing | None = None,
    max_scored_prompt_tokens: int | None = None,
    parsing: ParserChoice | None = None,
    tails: Sequence[str] = (),
) -> GenerationPlan:
    """Check what needs the model and the rendered prompts. Raises ApiError 400.

    Args:
        request_id: of the answer; each sequence's id is made from it.
        model: the model to generate with.
        prompts: token ids of each prompt.
        fields: the request.
        default_max_tokens: for a request without a limit; cut to what the context has room for; None: that.
        param: name of the field that the prompts came from.
        cache_salt: cached KV is shared only with requests that have the same one.
        constraint: what the text of every choice must be; it was checked.
        constraint_param: the field of the request that it came from.
        standing: how the sequences wait for an engine.
        max_scored_prompt_tokens: prompt tokens whose log probabilities one answer may tell; None: any number.
        parsing: what is read in the texts; None: nothing.
        tails: the last characters of each prompt, for that.
    """
    bad_words = _checked_tokens(fields, model)
    if constraint is not None and fields.searches:
        text = "'use_beam_search' cannot be combined with a constraint on the output."
        raise bad_request(text, "use_beam_search")
    _check_scored(prompts, fields, max_scored_prompt_tokens)
    limits = [
        _token_limit(len(prompt), model.max_model_len, fields, default_max_tokens, param)
        for prompt in prompts
    ]
    for prompt in prompts:
        _check_ids(prompt, model, param)
    return GenerationPlan(
        request_id=request_id,
        model=model,
        prompts=prompts,
        max_tokens=limits,
        n=fields.choices,
        samples=fields.samples,
        fields=fields,
        cache_salt=cache_salt,
        constraint=constraint,
        constraint_param=constraint_param,
        bad_words=bad_words,
        standing=standing or Standing(),
        parsing=parsing or ParserChoice(),
        tails=tails,
    )


def truncation(fields: GenerationFields, context: int) -> int | None:
    """Tokens of a prompt that are kept at the most; None: nothing is cut. Raises ApiError 400.

    `context`: the model's longest sequence. Of a prompt that is cut to what there is room for, so much is
    kept that the tokens asked for, or one, can follow."""
    asked = fields.truncate_prompt_tokens
    if asked is None:
        return None
    if asked > context:
        raise bad_request(
            f"Invalid 'truncate_prompt_tokens': must be at most the model's context, {context}.",
            "truncate_prompt_tokens",
        )
    return asked if asked > 0 else max(1, context - (fields.token_limit or 1))


def bad_word_tokens(words: Iterable[str], vocabulary: Vocabulary) -> list[list[int]]:
    """The tokens of each word, at a text's begin and after a space. Raises ApiError 400."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for form in (bare, " " + bare) if bare else (word,):
            ids = vocabulary.encode(form)
            if not ids:
                raise bad_request("Invalid 'bad_words': a word has no tokens.", "bad_words")
            found[tuple(ids)] = None
    return [list(ids) for ids in found]


def _checked_tokens(fields: GenerationFields, model: Model) -> list[list[int]]:
    """The tokens of the bad words. Raises ApiError 400 for a token id of the request that the model lacks."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_ids(getattr(fields, name) or (), model, name)
    bad_words = bad_word_tokens(fields.bad_words or (), model.vocabulary)
    _check_ids([token for word in bad_words for token in word], model, "bad_words")
    return bad_words


def _check_scored(prompts: Sequence[Sequence[int]], fields: GenerationFields, most: int | None) -> None:
    if most is None or fields.prompt_top_count is None:
        return
    if sum(map(len, prompts)) * fields.samples > most:
        param = "echo" if fields.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(
            f"Invalid '{param}': log probabilities of at most {most} prompt tokens, each choice's counted, "
            "can be told in an answer.",
            param,
        )


def _token_limit(prompt: int, context: int, fields: GenerationFields, default: int | None, param: str) -> int:
    if not prompt:
        raise bad_request(f"Invalid '{param}': the prompt has no tokens.", param)
    # Where nothing is to be generated, one token is, and dropped.
    requested = max(1, fields.token_limit) if fields.token_limit is not None else None
    if prompt + (requested or 1) > context:
        raise context_length_exceeded(context, prompt, requested or 1, param)
    room = context - prompt
    limit = requested or (room if default is None else min(default, room))
    if fields.min_tokens is not None and fields.min_tokens > limit:
        raise bad_request(f"Invalid 'min_tokens': only {limit} tokens can be generated.", "min_tokens")
    return limit


def _check_ids(ids: Collection[int], model: Model, param: str) -> None:
    if min(ids, default=0) < 0 or max(ids, default=0) >= model.vocab_size:
        raise bad_request(
            f"Invalid '{param}': an id is out of vocabulary (0 to {model.vocab_size - 1}).",
            param,
        )
