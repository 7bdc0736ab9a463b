"""Plan of a request before anything is sent: prompts as ids, limits, the sequences of its choices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from catenary.parameters import SAMPLING
from catenary.seeds import derive_seed, draw_seed
from catenary.text import Detokenizer, Vocabulary
from catenary.v1 import common_pb2, tokenizer_pb2
from gateway.auth import Caller, salted
from gateway.constraints import Wanted
from gateway.errors import bad_request, context_length_exceeded
from gateway.generation.requests import QueuePriority
from gateway.parsing.choice import ParserChoice, TextParser
from gateway.parsing.output import ContentStops
from gateway.schemas.generation import GenerationFields
from gateway.text.models import Model
from gateway.text.target import Rendered

# A nucleus that the best token fills by itself: the probability of that is at least one by the size of the
# vocabulary, at most 2^24.
_SMALLEST_NUCLEUS = 2.0**-24

ChatOrTexts = tokenizer_pb2.ChatInput | tokenizer_pb2.CompletionInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Request that was read, and its demands on the model; no peer knows of it yet.

    request_id: of the answer; each sequence's id is made from it.
    prompt: a chat or texts to be rendered, or the token ids of each prompt.
    prompt_param: the field that the prompt came in, for errors.
    default_max_tokens: for a request without a limit; None: to the end of the context.
    scores_stop_token: a stop token that is not shown has a log probability in the answer.
    drops_turns: leave out the oldest turns of a chat that does not fit.
    parsing: parsers of the answer's texts.
    wanted: constraint of the answer.
    """

    request_id: str
    model: Model
    fields: GenerationFields
    prompt: ChatOrTexts | list[list[int]]
    prompt_param: str
    caller: Caller = field(default_factory=Caller)
    default_max_tokens: int | None = None
    scores_stop_token: bool = False
    drops_turns: bool = False
    parsing: ParserChoice = field(default_factory=ParserChoice)
    wanted: Wanted | None = None


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Checked prompts and parameters of one request.

    A prompt has `samples` sequences, or one for a beam search, which yield `candidates` texts, of which `n`
    are answered: choice p * n + i is the i-th of prompt p. max_tokens: of each prompt's sequences, at least
    1; bad_words: tokens in a row that are not generated; tails: each prompt's last characters, if the answer
    is parsed."""

    prepared: Prepared
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    bad_words: Sequence[Sequence[int]] = ()
    constraint: common_pb2.Constraint | None = None
    priority: QueuePriority = field(default_factory=QueuePriority)
    tails: Sequence[str] = ()

    @property
    def request_id(self) -> str:
        return self.prepared.request_id

    @property
    def model(self) -> Model:
        return self.prepared.model

    @property
    def fields(self) -> GenerationFields:
        return self.prepared.fields

    @property
    def parsing(self) -> ParserChoice:
        return self.prepared.parsing

    @property
    def n(self) -> int:
        """Answered texts of each prompt."""
        return self.fields.choices

    @property
    def samples(self) -> int:
        """Texts of each prompt from which the best are answered; for a beam search, its width."""
        return self.fields.samples

    @property
    def top_count(self) -> int | None:
        """Alternatives reported for each token; None: no log probabilities."""
        return self.fields.top_count

    @property
    def prompt_only(self) -> bool:
        """Whether only the prompt is answered. An engine generates at least one token, which is dropped."""
        return self.fields.token_limit == 0

    @property
    def ranks(self) -> bool:
        """Whether the most probable of more samples are answered."""
        return self.samples > self.n and not self.fields.searches

    @property
    def ends_with_call(self) -> bool:
        """Whether a text ends with its first call. False where a constraint ensures that already, and for
        searches, which end before they are read."""
        return self.parsing.tools.single and self.constraint is None and not self.fields.searches

    @property
    def candidates(self) -> int:
        return self.n if self.fields.searches else self.samples

    @property
    def count(self) -> int:
        return len(self.prompts) * self.candidates

    @property
    def scored(self) -> int | None:
        """Alternatives requested from the engine for each token; None: no log probabilities."""
        if self.prompt_only:
            return None
        return 0 if self.top_count is None and self.ranks else self.top_count

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def sequences(self) -> int:
        return 1 if self.fields.searches else self.samples

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a decoder of text that follows `prompt`."""
        fields, vocabulary = self.fields, self.model.vocabulary
        hidden = fields.hides_special
        return vocabulary.detokenizer(
            prompt,
            shown=vocabulary.special_named(self.parsing.markers) if hidden else vocabulary.special_ids,
            spaced=fields.spaces_between_special_tokens is not False,
        )

    def parser(self, index: int) -> TextParser | None:
        """Return the parser of a choice's text, if it is parsed."""
        if not self.parsing.needed:
            return None
        stops = None
        if self.fields.stops:
            stops = ContentStops(self.fields.stops, include=bool(self.fields.include_stop_str_in_output))
        return self.parsing.parser(self.tails[index // self.candidates], stops)

    def specs(self, traceparent: str | None) -> list[common_pb2.SequenceSpec]:
        """Return the sequences, those of a prompt one after another."""
        stopping = [self._stopping(limit) for limit in self.max_tokens]
        sampling = self._sampling()
        return [
            self._spec(prompt, sample, seed, sampling, stopping[prompt], traceparent)
            for prompt, seed in enumerate(self._seeds())
            for sample in range(self.sequences)
        ]

    def _seeds(self) -> list[int]:
        if self.fields.seed is not None:
            return [self.fields.seed] * len(self.prompts)
        return [draw_seed() for _ in self.prompts]

    def _spec(
        self,
        prompt: int,
        sample: int,
        seed: int,
        sampling: common_pb2.SamplingParams,
        stopping: common_pb2.StoppingParams,
        traceparent: str | None,
    ) -> common_pb2.SequenceSpec:
        ids = self.prompts[prompt]
        sampling.seed = seed if self.sequences == 1 else derive_seed(seed, sample)
        spec = common_pb2.SequenceSpec(
            request_id=f"{self.request_id}-{prompt * self.sequences + sample}",
            model=self.model.name,
            token_ids=ids,
            prompt_len=len(ids),
            sampling=sampling,
            stopping=stopping,
            response=self._response(first=sample == 0),
            traceparent=traceparent,
            cache_salt=salted(self.prepared.caller.cache_salt, self.fields.cache_salt),
            constraint=self.constraint,
            beam_search=self._search(),
        )
        self.priority.enter(spec)
        return spec

    def _sampling(self) -> common_pb2.SamplingParams:
        fields = self.fields
        draws = not fields.searches
        numbers: dict[str, Any] = {
            name: getattr(fields, name) for name, one in SAMPLING.items() if draws or not one.draws
        }
        # OpenAI's range begins at 0, an engine's above it.
        if numbers.get("top_p") == 0:
            numbers["top_p"] = _SMALLEST_NUCLEUS
        return common_pb2.SamplingParams(
            **numbers,
            logit_bias=[
                common_pb2.LogitBias(token_id=token_id, bias=bias)
                for token_id, bias in (fields.logit_bias or {}).items()
            ],
            bad_words=[common_pb2.TokenSequence(token_ids=ids) for ids in self.bad_words],
            allowed_token_ids=fields.allowed_token_ids or (),
        )

    def _stopping(self, max_tokens: int) -> common_pb2.StoppingParams:
        fields = self.fields
        return common_pb2.StoppingParams(
            max_tokens=max_tokens,
            min_tokens=fields.min_tokens,
            stop_token_ids=fields.stop_token_ids or (),
            ignore_eos=fields.ignore_eos,
        )

    def _response(self, *, first: bool) -> common_pb2.ResponseOptions | None:
        """Return the response options. Only a prompt's `first` sequence reports its log probabilities."""
        prompt = self.fields.prompt_top_count if first else None
        if self.scored is None and prompt is None:
            return None
        return common_pb2.ResponseOptions(top_logprobs=self.scored, prompt_logprobs=prompt)

    def _search(self) -> common_pb2.BeamSearch | None:
        fields = self.fields
        if not fields.searches:
            return None
        return common_pb2.BeamSearch(
            width=self.samples,
            length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
            early_stopping=bool(fields.early_stopping),
            results=self.n,
        )


def make_plan(
    prepared: Prepared,
    rendered: Rendered,
    *,
    priority: QueuePriority | None = None,
    max_scored_prompt_tokens: int | None = None,
) -> GenerationPlan:
    """Check what needs the model and the rendered prompts. Raises ApiError 400.

    Args:
        prepared: the request; its constraint was checked.
        rendered: its prompts, not cut yet.
        priority: queue priority of the sequences.
        max_scored_prompt_tokens: most prompt tokens with log probabilities in one answer; None: any number.
    """
    fields, model, param = prepared.fields, prepared.model, prepared.prompt_param
    if (keep := truncation(fields, model.max_model_len)) is not None:
        rendered = rendered.truncated(keep)
    prompts = rendered.prompts
    constraint = None
    if prepared.wanted is not None:
        # A chat may begin in reasoning, behind which the constraint begins to hold.
        parsing = prepared.parsing
        after = parsing.thoughts_end(rendered.text_tails[0]) if parsing.needed else None
        constraint = prepared.wanted.message(after)
    bad_words = _checked_tokens(fields, model)
    if constraint is not None and fields.searches:
        text = "'use_beam_search' cannot be combined with a constraint on the output."
        raise bad_request(text, "use_beam_search")
    _check_scored(prompts, fields, max_scored_prompt_tokens)
    limits = [
        _token_limit(len(prompt), model.max_model_len, fields, prepared.default_max_tokens, param)
        for prompt in prompts
    ]
    for prompt in prompts:
        _check_ids(prompt, model, param)
    return GenerationPlan(
        prepared, prompts, limits, bad_words, constraint, priority or QueuePriority(), rendered.text_tails
    )


def truncation(fields: GenerationFields, context: int) -> int | None:
    """Return the most tokens of a prompt that are kept; None if it is not cut. Raises ApiError 400.

    `context`: the model's longest sequence. A prompt that is cut to fit leaves room for the requested tokens,
    or for one."""
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
    """Return the tokens of each word, at a text's begin and after a space. Raises ApiError 400."""
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
    """Return the tokens of the bad words. Raises ApiError 400 for a token id that the model lacks."""
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
