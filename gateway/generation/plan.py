"""The plan of a request before anything is sent: prompts as ids, and the sequences of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from catenary.seeds import derive_seed, draw_seed
from catenary.text import Detokenizer
from catenary.v1 import common_pb2
from gateway.generation.priorities import Standing
from gateway.parsing.choice import ParserChoice
from gateway.parsing.parser import TextParser
from gateway.parsing.stops import ContentStops
from gateway.schemas.generation import GenerationFields
from gateway.text.models import Model

# A nucleus that the best token fills by itself: the probability of that is at least one by the size of the
# vocabulary, at most 2^24.
_SMALLEST_NUCLEUS = 2.0**-24


def _nucleus(top_p: float | None) -> float | None:
    """OpenAI's range begins at 0, an engine's above it."""
    return _SMALLEST_NUCLEUS if top_p == 0 else top_p


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Prompts and parameters of one request, all checked.

    A prompt has `samples` sequences, or one for a beam search, and `candidates` texts come of them, of which
    `n` are answered: choice p * n + i is the i-th of prompt p. max_tokens: of each prompt's sequences, at
    least 1; constraint_param: the field that the constraint came in; bad_words: tokens in a row that are not
    generated; standing: how they wait for an engine; parsing: what is read in the texts; tails: each prompt's
    last characters, if anything is."""

    request_id: str
    model: Model
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    n: int
    samples: int
    fields: GenerationFields
    cache_salt: str = ""
    constraint: common_pb2.Constraint | None = None
    constraint_param: str | None = None
    bad_words: Sequence[Sequence[int]] = ()
    standing: Standing = field(default_factory=Standing)
    parsing: ParserChoice = field(default_factory=ParserChoice)
    tails: Sequence[str] = ()

    @property
    def top_count(self) -> int | None:
        """Alternatives that are reported for each token; None: no log probabilities."""
        return self.fields.top_count

    @property
    def prompt_only(self) -> bool:
        """Whether the prompt alone is answered. An engine generates one token at least, which is dropped."""
        return self.fields.token_limit == 0

    @property
    def ranks(self) -> bool:
        """Whether the most probable of more samples are answered."""
        return self.samples > self.n and not self.fields.searches

    @property
    def ends_with_call(self) -> bool:
        """Whether a text ends with its first call. A constraint sees to that by itself, and what was searched
        for has ended before it is read."""
        return self.parsing.tools.single and self.constraint is None and not self.fields.searches

    @property
    def candidates(self) -> int:
        """Texts per prompt."""
        return self.n if self.fields.searches else self.samples

    @property
    def count(self) -> int:
        """Texts of all prompts."""
        return len(self.prompts) * self.candidates

    @property
    def scored(self) -> int | None:
        """Alternatives that the engine is asked for with each token; None: no log probabilities."""
        if self.prompt_only:
            return None
        return 0 if self.top_count is None and self.ranks else self.top_count

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def sequences(self) -> int:
        """Sequences per prompt."""
        return 1 if self.fields.searches else self.samples

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """What decodes a text that goes on from `prompt`."""
        fields, vocabulary = self.fields, self.model.vocabulary
        hidden = fields.hides_special
        return vocabulary.detokenizer(
            prompt,
            shown=vocabulary.special_named(self.parsing.markers) if hidden else vocabulary.special_ids,
            spaced=fields.spaces_between_special_tokens is not False,
        )

    def parser(self, index: int) -> TextParser | None:
        """What reads the text of a choice, if anything is to be read in it."""
        if not self.parsing.needed:
            return None
        stops = None
        if self.fields.stops:
            stops = ContentStops(self.fields.stops, include=bool(self.fields.include_stop_str_in_output))
        return self.parsing.parser(self.tails[index // self.candidates], stops)

    def specs(self, traceparent: str | None) -> list[common_pb2.SequenceSpec]:
        """The sequences, those of a prompt one after another."""
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
            cache_salt=self.cache_salt,
            constraint=self.constraint,
            beam_search=self._search(),
        )
        self.standing.enter(spec)
        return spec

    def _sampling(self) -> common_pb2.SamplingParams:
        fields = self.fields
        draws = not fields.searches
        return common_pb2.SamplingParams(
            temperature=fields.temperature if draws else None,
            top_p=_nucleus(fields.top_p) if draws else None,
            top_k=fields.top_k if draws else None,
            min_p=fields.min_p if draws else None,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            repetition_penalty=fields.repetition_penalty,
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
        """`first`: of its prompt. It alone reports the prompt's log probabilities."""
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
