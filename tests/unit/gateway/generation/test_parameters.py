"""Further parameters of vLLM and OpenAI: what is taken, which field a refusal names, what an engine gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from catenary.text import Vocabulary
from catenary.v1 import common_pb2
from gateway.constraints import Wanted
from gateway.errors import ApiError
from gateway.generation.plan import (
    GenerationPlan,
    Prepared,
    bad_word_tokens,
    make_plan,
    truncation,
)
from gateway.generation.requests import Priorities, QueuePriority
from gateway.pooling.answers import document_work
from gateway.routes.pooling import read_embedding
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.text.models import Model
from gateway.text.target import Rendered
from tests.support.steps import counted
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE, byte_ids, tokenizer_json

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
MODEL = Model("tiny", 100, VOCAB_SIZE, VOCABULARY)
MESSAGES = [{"role": "user", "content": "x"}]
LIMITS = RequestLimits()
NAN, INFINITY = float("nan"), float("inf")


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {"model": "m", "messages": MESSAGES, **fields}, LIMITS)


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, {"model": "m", "prompt": "x", **fields}, LIMITS)


def refused(parse: Any, **fields: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert str(caught.value.param).split(".")[0] in caught.value.message
    return caught.value.param


def plan_of(
    fields: Any, prompts: list[list[int]] | None = None, wanted: Wanted | None = None, **options: Any
) -> GenerationPlan:
    given = prompts or [[7, 8, 9]]
    return make_plan(prepared(fields, given, wanted=wanted), Rendered.of_ids(given), **options)


def prepared(
    fields: Any, prompts: list[list[int]], *, model: Model = MODEL, wanted: Wanted | None = None
) -> Prepared:
    return Prepared(
        request_id="r",
        model=model,
        fields=fields,
        prompt=prompts,
        prompt_param="prompt",
        default_max_tokens=16,
        wanted=wanted,
    )


def planned(**fields: Any) -> GenerationPlan:
    return plan_of(completion(**fields))


def spec_of(**fields: Any) -> common_pb2.SequenceSpec:
    (spec,) = planned(**fields).specs(None)
    return spec


BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (2.1, -2.1, "1", NAN)],
    *[("logit_bias", {key: 1}) for key in ("AI", "1.5", "", "-1", " 1", "1e2", "٣", "9" * 30)],
    *[("logit_bias", {key: 1}) for key in ("05", "00", "007", "+5", "-0", "5 ", "5\n", "0x5", "\uff11")],
    *[("logit_bias", {"1": value}) for value in (101, -100.5, NAN, INFINITY, "1", True, None)],
    ("logit_bias", [1]),
    ("logit_bias", "x"),
    ("logit_bias", {str(key): 0 for key in range(1025)}),
    *[("allowed_token_ids", value) for value in ([], [-1], [True], [1.0], ["1"], 1, [0] * 16385)],
    *[("bad_words", value) for value in ([""], [1], "x", [None], ["a"] * 129, ["a" * 129])],
    *[("min_tokens", value) for value in (-1, 10**12, 2**63, 1.5)],
    *[("prompt_logprobs", value) for value in (-1, 21, True, 1.5, "1", 2**63)],
    *[("truncate_prompt_tokens", value) for value in (0, -2, 1.5, 2**63, "5")],
    *[("best_of", value) for value in (-1, 21, 10**6, 1.5, "2", 17)],
    *[("cache_salt", value) for value in ("", "a" * 129, "a" * 10_000_000, 5)],
    *[("priority", value) for value in (101, -101, 2**31, 1.5, "1", True)],
    *[("service_tier", value) for value in ("scale", "", 5, ["auto"])],
    *[("skip_special_tokens", value) for value in (1, "true")],
    *[("length_penalty", value) for value in (0.5, 11, NAN, "1")],
    *[("early_stopping", value) for value in (True, "never", 1)],
    ("use_beam_search", 1),
    ("return_token_ids", 1),
    ("include_stop_str_in_output", "yes"),
    ("kv_transfer_params", {"tp_size": 10**9}),
    ("token_ids_logprob", [-1]),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("name", "value"), BAD)
@pytest.mark.advisory("CVE-2026-21869", "CVE-2026-100647")
def test_bad_values_are_named_at_a_glance(parse: Any, name: str, value: Any) -> None:
    param, calls = counted(lambda: refused(parse, **{name: value}))
    assert str(param).split(".")[0] == name
    assert calls < 2000


BAD_TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("keep_special_tokens", {"keep_special_tokens": True, "skip_special_tokens": True}),
    ("keep_special_tokens", {"keep_special_tokens": False, "skip_special_tokens": False}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("best_of", {"best_of": 3, "n": 1, "stream": True}),
    ("best_of", {"best_of": 1, "n": 2}),
    ("temperature", {"use_beam_search": True, "temperature": 0.5}),
    ("top_p", {"use_beam_search": True, "top_p": 0.5}),
    ("top_k", {"use_beam_search": True, "top_k": 5}),
    ("min_p", {"use_beam_search": True, "min_p": 0.5}),
    ("stop", {"use_beam_search": True, "stop": "x"}),
    ("prompt_logprobs", {"use_beam_search": True, "prompt_logprobs": 1}),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("name", "fields"), BAD_TOGETHER)
def test_what_does_not_go_together_is_named(parse: Any, name: str, fields: dict[str, Any]) -> None:
    assert refused(parse, **fields) == name


def test_no_nucleus_leaves_the_best_token_alone() -> None:
    """An engine takes no 0. A nucleus below any best token's probability holds that token and no other."""
    for parse in (chat, completion):
        assert parse(top_p=0).top_p == 0
    assert 0 < spec_of(top_p=0).sampling.top_p <= 1 / (1 << 24)
    assert spec_of(top_p=0.5).sampling.top_p == 0.5
    assert not spec_of().sampling.HasField("top_p")


def test_what_does_not_go_together_in_completions() -> None:
    assert refused(completion, max_tokens=0) == "max_tokens"
    assert refused(completion, use_beam_search=True, echo=True, logprobs=1) == "echo"
    assert refused(completion, suffix="x") == "suffix"
    assert refused(completion, echo=1) == "echo"
    assert refused(chat, echo=True) == "echo"
    assert refused(completion, prompt=["a"] * 100, best_of=3) == "n"


GOOD: list[dict[str, Any]] = [
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": {"1": 5, "511": -100}},
    {"length_penalty": 1, "early_stopping": False},
    {"use_beam_search": True, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "length_penalty": 0.5},
    {"use_beam_search": True, "n": 2, "best_of": 4, "stream": True},
    {"keep_special_tokens": True, "skip_special_tokens": False},
    {"truncate_prompt_tokens": -1},
    {"cache_salt": "a/b"},
    {"service_tier": "auto", "user": "u", "suffix": None},
    {"n": 2, "best_of": 2, "stream": True},
]


@pytest.mark.parametrize("fields", GOOD)
@pytest.mark.advisory("CVE-2026-100647")
def test_good_values_are_taken(fields: dict[str, Any]) -> None:
    assert completion(**fields).model == "m"


def test_sampling_parameters_reach_the_engine() -> None:
    spec = spec_of(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"3": 5, "9": -100},
        allowed_token_ids=[3, 4],
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=[5],
        ignore_eos=True,
        cache_salt="s",
        priority=3,
    )
    sampling, stopping = spec.sampling, spec.stopping
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.top_k) == (0.5, -0.5, 7)
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(3, 5.0), (9, -100.0)]
    assert list(sampling.allowed_token_ids) == [3, 4]
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (stopping.min_tokens, list(stopping.stop_token_ids), stopping.ignore_eos) == (2, [5], True)
    assert not spec.HasField("response")


def test_absent_parameters_are_the_engines_affair() -> None:
    spec = spec_of()
    assert [field.name for field, _ in spec.sampling.ListFields()] == ["seed"]
    assert [field.name for field, _ in spec.stopping.ListFields()] == ["max_tokens"]


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.advisory("CVE-2026-93840")
def test_ids_beyond_the_vocabulary_are_named(name: str) -> None:
    for token_id in (VOCAB_SIZE, 2**31, 2**63):
        value: Any = {str(token_id): 1} if name == "logit_bias" else [token_id]
        assert refused(planned, **{name: value}) == name


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    assert bad_word_tokens(["xy"], VOCABULARY) == [VOCABULARY.encode("xy"), VOCABULARY.encode(" xy")]
    assert bad_word_tokens([" x", "x"], VOCABULARY) == [byte_ids("x"), VOCABULARY.encode(" x")]
    assert bad_word_tokens([" "], VOCABULARY) == [byte_ids(" ")]
    assert bad_word_tokens(["<|im_end|>"], VOCABULARY)[0] == [EOS_ID]


@pytest.mark.advisory("CVE-2026-93989")
def test_bad_words_beyond_the_logits_are_refused() -> None:
    narrow = Model("tiny", 100, 300, VOCABULARY)
    with pytest.raises(ApiError) as caught:
        make_plan(prepared(completion(bad_words=["é"]), [[7]], model=narrow), Rendered.of_ids([[7]]))
    assert caught.value.param == "bad_words"


def test_truncation_keeps_what_fits() -> None:
    assert truncation(completion(), 100) is None
    assert truncation(completion(truncate_prompt_tokens=5), 100) == 5
    assert truncation(completion(truncate_prompt_tokens=-1, max_tokens=30), 100) == 70
    assert truncation(completion(truncate_prompt_tokens=-1), 100) == 99
    assert refused(lambda **f: truncation(completion(**f), 100), truncate_prompt_tokens=101) == (
        "truncate_prompt_tokens"
    )


def test_samples_of_one_prompt_and_what_the_first_alone_reports() -> None:
    specs = planned(n=2, echo=True, logprobs=2, prompt_logprobs=4, seed=1).specs(None)
    asked = [spec.response for spec in specs]
    assert [response.HasField("prompt_logprobs") for response in asked] == [True, False]
    assert (asked[0].prompt_logprobs, asked[0].top_logprobs) == (4, 2)
    assert specs[0].sampling.seed != specs[1].sampling.seed


def test_ranking_asks_for_log_probabilities_that_are_not_answered() -> None:
    plan = planned(best_of=3)
    assert (plan.count, plan.n, plan.ranks, plan.top_count) == (3, 1, True, None)
    assert all(spec.response.HasField("top_logprobs") for spec in plan.specs(None))


def test_a_prompt_alone_costs_one_token_that_is_dropped() -> None:
    plan = planned(max_tokens=0, echo=True, logprobs=1)
    (spec,) = plan.specs(None)
    assert (plan.prompt_only, spec.stopping.max_tokens) == (True, 1)
    assert not spec.response.HasField("top_logprobs")
    assert spec.response.prompt_logprobs == 1


def test_beam_search_is_one_sequence_of_a_prompt() -> None:
    plan = plan_of(
        completion(use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping=True),
        [[7], [8]],
    )
    specs = plan.specs(None)
    assert (len(specs), plan.count) == (2, 4)
    search = specs[0].beam_search
    assert (search.width, search.results, search.length_penalty, search.early_stopping) == (4, 2, 0.5, True)
    assert [field.name for field, _ in specs[0].sampling.ListFields()] == ["seed"]


def test_beam_search_goes_with_no_constraint() -> None:
    wanted = Wanted(common_pb2.CONSTRAINT_KIND_REGEX, "x", "guided_regex")
    with pytest.raises(ApiError) as caught:
        plan_of(completion(use_beam_search=True), wanted=wanted)
    assert caught.value.param == "use_beam_search"
    assert plan_of(completion(), wanted=wanted).specs(None)[0].constraint == wanted.message()


def test_priorities() -> None:
    priorities = Priorities(priority=-10, flex=10)
    assert [priorities.of(None, tier) for tier in (None, "auto", "flex", "priority")] == [0, 0, 10, -10]
    assert priorities.of(-3, "flex") == -3
    spec = plan_of(completion(), priority=QueuePriority(priority=-10)).specs(None)[0]
    assert spec.priority == -10
    assert not any(spec.HasField(name) for name in ("tenant", "session_id", "max_wait_ms"))


def test_a_chat_to_embed_without_a_template_is_told_what_to_use() -> None:
    fields = read_embedding({"model": "m", "messages": MESSAGES}, LIMITS)
    with pytest.raises(ApiError, match="use 'input'") as caught:
        document_work(fields, MODEL, common_pb2.MODEL_TASK_EMBED)
    assert (caught.value.status, caught.value.param) == (400, "messages")
