"""Conversations to send: lengths drawn from distributions, and text or token ids of these lengths."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, Self

from tokenizers import Tokenizer

MAX_LENGTH = 1 << 20
_FORMS = "N, uniform:LOW:HIGH, ratio:N:R (N * (1 - R) to N * (1 + R)), normal:MEAN:STD or lognormal:MEAN:STD"


class LengthKind(Enum):
    """The shape of a distribution."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over 1 .. MAX_LENGTH. `first` and `second` are: the length (twice); the lowest and the
    highest; mean and standard deviation of the length itself, before it is rounded and cut to the bounds."""

    kind: LengthKind
    first: float
    second: float

    def draw(self, generator: random.Random) -> int:
        """Return one length."""
        match self.kind:
            case LengthKind.FIXED:
                return int(self.first)
            case LengthKind.UNIFORM:
                return generator.randint(int(self.first), int(self.second))
            case LengthKind.NORMAL:
                value = generator.gauss(self.first, self.second)
            case LengthKind.LOGNORMAL:
                spread = math.log1p((self.second / self.first) ** 2)
                value = generator.lognormvariate(math.log(self.first) - spread / 2, math.sqrt(spread))
        return round(min(max(value, 1), MAX_LENGTH))


def parse_lengths(text: str) -> Lengths:
    """Read a distribution: `128`, `uniform:64:256`, `ratio:128:0.5`, `normal:128:32`, `lognormal:128:64`.

    Raises ValueError, one line.
    """
    kind, *parts = text.strip().split(":")
    if not parts:
        kind, parts = "fixed", [kind, kind]
    try:
        first, second = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is not a length: {_FORMS}") from None
    if not 1 <= first <= MAX_LENGTH:
        raise ValueError(f"{text[:50]!r}: a length is 1 to {MAX_LENGTH}")
    match kind:
        case "fixed" | "uniform":
            if not (first.is_integer() and second.is_integer()):
                raise ValueError(f"{text[:50]!r}: a length is a whole number")
            if not first <= second <= MAX_LENGTH:
                raise ValueError(f"{text[:50]!r}: LOW to HIGH, at most {MAX_LENGTH}")
            return Lengths(LengthKind(kind), first, second)
        case "ratio":
            if not 0 <= second < 1:
                raise ValueError(f"{text[:50]!r}: a ratio is 0 up to, but not, 1")
            low, high = max(1, math.floor(first * (1 - second))), math.ceil(first * (1 + second))
            return Lengths(LengthKind.UNIFORM, low, min(high, MAX_LENGTH))
        case "normal" | "lognormal":
            if not 0 <= second <= MAX_LENGTH:
                raise ValueError(f"{text[:50]!r}: a standard deviation is 0 to {MAX_LENGTH}")
            return Lengths(LengthKind(kind), first, second)
        case _:
            raise ValueError(f"{text[:50]!r} is not a length: {_FORMS}")


Prompt = str | tuple[int, ...]
"""A text, or token ids."""

_MAX_TOKENIZER_BYTES = 256 << 20
_WORD = re.compile(r"[A-Za-z]+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Words that are tried, of all that a vocabulary has.
_MAX_WORDS = 8192
_ROUNDS = 8
_PLAIN = (
    "time people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city community name president team "
    "minute idea body information back parent face others level office door health person art war history"
)


class Source(Protocol):
    """Makes prompts."""

    def make(self, generator: random.Random, tokens: int) -> Prompt:
        """Return a prompt of so many tokens."""

    def join(self, head: Prompt, tail: Prompt) -> Prompt:
        """Return one prompt of two."""

    def count(self, text: str) -> int | None:
        """Return the number of a text's tokens; None: not known."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids low .. high - 1, each as likely as the others. Only completions take ids."""

    low: int
    high: int

    def __post_init__(self) -> None:
        """Raise ValueError."""
        if not 0 <= self.low < self.high:
            raise ValueError(f"token ids from {self.low} up to {self.high} are none")

    def make(self, generator: random.Random, tokens: int) -> Prompt:
        """Return a prompt of so many tokens."""
        return tuple(generator.choices(range(self.low, self.high), k=tokens))

    def join(self, head: Prompt, tail: Prompt) -> Prompt:
        """Return one prompt of two. Raises TypeError for texts."""
        if isinstance(head, str) or isinstance(tail, str):
            raise TypeError("these are no token ids")
        return head + tail

    def count(self, text: str) -> int | None:
        """Return None: tokens are not known."""
        return None


class PlainWords:
    """Common English words, each of which is about one token for most tokenizers. The server's usage says how
    many they were.
    """

    def __init__(self) -> None:
        self._words = _PLAIN.split()

    def make(self, generator: random.Random, tokens: int) -> Prompt:
        """Return a text of so many words."""
        return " ".join(generator.choices(self._words, k=tokens))

    def join(self, head: Prompt, tail: Prompt) -> Prompt:
        """Return one prompt of two."""
        return f"{head} {tail}"

    def count(self, text: str) -> int | None:
        """Return None: tokens are not known."""
        return None


class TokenizerText:
    """Words that are one token each for a tokenizer, so that texts have the length that was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError if the vocabulary has no words."""
        self._tokenizer = tokenizer
        self._words = _single_tokens(tokenizer)
        if not self._words:
            raise ValueError("the tokenizer has no words that are one token")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a tokenizer.json, the one in a model's directory, or that of a hub's id in the local cache.

        Nothing is fetched. Raises ValueError, one line.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.exists() and _HUB_ID.fullmatch(str(path)):
            file = _cached(str(path))
        try:
            if file.stat().st_size > _MAX_TOKENIZER_BYTES:
                raise ValueError(f"{file} is larger than {_MAX_TOKENIZER_BYTES} bytes")
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror or 'cannot be read'}") from None
        except ValueError:
            raise
        except Exception:  # The library raises Exception itself.
            raise ValueError(f"{file} is not a tokenizer.json") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer)

    def make(self, generator: random.Random, tokens: int) -> Prompt:
        """Return a text of so many tokens, without those that a server puts before it."""
        words = generator.choices(self._words, k=tokens)
        for _ in range(_ROUNDS):
            excess = self._count(" ".join(words)) - tokens
            if excess == 0 or (excess > 0 and len(words) <= 1):
                break
            words = words[:-excess] if excess > 0 else words + generator.choices(self._words, k=-excess)
            words = words or generator.choices(self._words, k=1)
        return " ".join(words)

    def join(self, head: Prompt, tail: Prompt) -> Prompt:
        """Return one prompt of two."""
        return f"{head} {tail}"

    def count(self, text: str) -> int | None:
        """Return the number of a text's tokens, without those that a server puts before it."""
        return self._count(text)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _cached(hub_id: str) -> Path:
    """Return the tokenizer of a model that huggingface_hub has fetched before. Raises ValueError."""
    # Comes with tokenizers; only ids need it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(hub_id, "tokenizer.json")
    except HFValidationError:
        file = None
    if not isinstance(file, str):
        raise ValueError(
            f"{hub_id} is no file, and its tokenizer is not in the cache of huggingface_hub: give a "
            "tokenizer.json or the directory of a model"
        )
    return Path(file)


def _single_tokens(tokenizer: Tokenizer) -> Sequence[str]:
    """Return words that are one more token after another word, in the order of their ids."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    pieces = sorted((number, piece) for piece, number in tokenizer.get_vocab().items())
    # The stand-ins for a space: of byte-level vocabularies and of sentencepiece ones.
    spaced = [piece[1:] for number, piece in pieces if piece[:1] in "Ġ▁" and number not in special]
    words = [word for word in spaced if _WORD.fullmatch(word)][:_MAX_WORDS]
    alone = len(tokenizer.encode("a", add_special_tokens=False).ids)
    encoded = tokenizer.encode_batch([f"a {word}" for word in words], add_special_tokens=False)
    return [word for word, found in zip(words, encoded, strict=True) if len(found.ids) == alone + 1]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `output_tokens`: the longest answer, None: as the server likes."""

    prompt: Prompt
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one session, at least one; each further one is asked when the one before is answered, with all
    that was said so far in front of it.
    """

    turns: tuple[Turn, ...]


def random_conversations(
    count: int,
    *,
    prompts: Lengths,
    outputs: Lengths,
    source: Source,
    seed: int = 0,
    prefix_tokens: int = 0,
    prefixes: int = 1,
    turns: int = 1,
) -> list[Conversation]:
    """Return `count` conversations of random prompts; each depends on the seed and its own number alone.

    Args:
        prompts: lengths of the prompts in tokens, without prefix.
        outputs: lengths of the answers in tokens.
        source: what makes prompts of that many tokens.
        prefix_tokens: length of what stands before the first prompt of a conversation, one of `prefixes`
            texts.
        turns: requests of each conversation.
    """
    heads = [source.make(random.Random(f"prefix {seed} {index}"), prefix_tokens) for index in range(prefixes)]

    def conversation(index: int) -> Conversation:
        generator = random.Random(f"conversation {seed} {index}")
        head = generator.choice(heads)
        made = []
        for number in range(turns):
            prompt = source.make(generator, prompts.draw(generator))
            if prefix_tokens and number == 0:
                prompt = source.join(head, prompt)
            made.append(Turn(prompt, outputs.draw(generator)))
        return Conversation(tuple(made))

    return [conversation(index) for index in range(count)]
