"""What a client asks of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from catenary.v1 import common_pb2


class GenerateOptions(TypedDict, total=False):
    """Parameters of a sequence, by the names of SequenceSpec in protos/catenary/v1/common.proto, which says
    what they mean. What is left out takes the model's own default."""

    prompt_len: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    keep_top_k_duplicates: bool | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[Sequence[int]]
    allowed_token_ids: Sequence[int]
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    cache_salt: str | None
    constraint: common_pb2.Constraint | None
    beam_search: common_pb2.BeamSearch | None


def make_spec(
    token_ids: Sequence[int], model: str, request_id: str, options: GenerateOptions
) -> common_pb2.SequenceSpec:
    """The sequence on the wire."""
    return common_pb2.SequenceSpec(
        request_id=request_id,
        model=model,
        token_ids=token_ids,
        prompt_len=options.get("prompt_len"),
        sampling=common_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
            keep_top_k_duplicates=options.get("keep_top_k_duplicates"),
            min_p=options.get("min_p"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            repetition_penalty=options.get("repetition_penalty"),
            logit_bias=[
                common_pb2.LogitBias(token_id=token, bias=bias)
                for token, bias in options.get("logit_bias", {}).items()
            ],
            bad_words=[common_pb2.TokenSequence(token_ids=word) for word in options.get("bad_words", ())],
            allowed_token_ids=options.get("allowed_token_ids", ()),
            seed=options.get("seed"),
        ),
        stopping=common_pb2.StoppingParams(
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens"),
            stop_token_ids=options.get("stop_token_ids", ()),
            ignore_eos=options.get("ignore_eos"),
        ),
        response=common_pb2.ResponseOptions(
            top_logprobs=options.get("top_logprobs"), prompt_logprobs=options.get("prompt_logprobs")
        ),
        priority=options.get("priority"),
        cache_salt=options.get("cache_salt"),
        constraint=options.get("constraint"),
        beam_search=options.get("beam_search"),
    )
