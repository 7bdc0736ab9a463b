"""Conversations from files: ShareGPT's format, and lines of JSON."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from catenary_apps.load.answers import shown
from catenary_apps.load.conversations import MAX_LENGTH, Conversation, Lengths, Turn

_HUMANS = ("human", "user")
_MACHINES = ("gpt", "assistant", "chatgpt", "bing", "bard")
# Characters that one token is taken for where no tokenizer is at hand.
_CHARACTERS_PER_TOKEN = 4


class _Message(msgspec.Struct):
    """One message; ShareGPT's names, then OpenAI's."""

    sender: str | None = msgspec.field(name="from", default=None)
    value: str | None = None
    role: str | None = None
    content: str | None = None


class _Entry(msgspec.Struct):
    conversations: list[_Message] = []
    messages: list[_Message] = []


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int]
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of a file's use: at most `max_bytes` of it are read, and prompts of `min_tokens` to
    `max_prompt_tokens` tokens, which with their answers have at most `max_total_tokens`."""

    max_bytes: int = 1 << 30
    min_tokens: int = 4
    max_prompt_tokens: int = 1024
    max_total_tokens: int = 2048


def sharegpt_conversations(
    path: Path,
    count: int,
    *,
    counter: Callable[[str], int | None],
    outputs: Lengths | None = None,
    limits: FileLimits = FileLimits(),
    turns: int = 1,
    seed: int = 0,
) -> list[Conversation]:
    """Return up to `count` conversations of a ShareGPT file (a JSON array), ordered by the seed.

    Args:
        counter: the tokens of a text; where it does not know, a token is taken for four characters.
        outputs: lengths of the answers; None: as long as those in the file, for which `counter` must know.
        turns: questions of each conversation that are asked, if it has so many.

    Raises:
        ValueError: the file cannot be read, is too large, is something else, has an entry that is no
            conversation (the text says which and why) or nothing that fits.
    """
    entries = _entries(path, _read(path, limits))
    generator = random.Random(f"sharegpt {seed}")
    generator.shuffle(entries)
    chosen: list[Conversation] = []
    for entry in entries:
        if len(chosen) == count:
            break
        asked = _turns(_pairs(entry)[:turns], counter, outputs, limits, generator)
        if asked:
            chosen.append(Conversation(asked))
    if not chosen:
        raise ValueError(f"{path} has no conversation within the limits of lengths")
    return chosen


def lines_conversations(
    path: Path, count: int, *, outputs: Lengths, limits: FileLimits = FileLimits(), seed: int = 0
) -> list[Conversation]:
    """Return up to `count` conversations of one turn, in order, from lines `{"prompt": text or ids}`, with
    `output_tokens` beside it or a length of `outputs`. Raises ValueError, one line.
    """
    generator, decoder = random.Random(f"lines {seed}"), msgspec.json.Decoder(_Line)
    chosen: list[Conversation] = []
    for number, line in enumerate(_read(path, limits).splitlines(), 1):
        if len(chosen) == count:
            break
        if not line.strip():
            continue
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = f"expected an object with prompt: {_why(error)}"
            raise ValueError(f"{path}, line {number}: {reason}") from None
        wanted = outputs.draw(generator) if found.output_tokens is None else found.output_tokens
        if not found.prompt or not 1 <= wanted <= MAX_LENGTH:
            raise ValueError(f"{path}, line {number}: an empty prompt, or output_tokens out of range")
        prompt = found.prompt if isinstance(found.prompt, str) else tuple(found.prompt)
        chosen.append(Conversation((Turn(prompt, wanted),)))
    if not chosen:
        raise ValueError(f"{path} has no prompts")
    return chosen


def _entries(path: Path, data: bytes) -> list[_Entry]:
    try:
        raw = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no array of ShareGPT conversations: {_why(error)}") from None
    decoder, entries = msgspec.json.Decoder(_Entry), []
    for index, one in enumerate(raw):
        try:
            entries.append(decoder.decode(one))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, entry {index} (from 0) is no conversation: {_why(error)}") from None
    return entries


def _why(error: Exception) -> str:
    """Return the decoder's message: types and places, and of contents no more than a field's name."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else shown(str(error))


def _read(path: Path, limits: FileLimits) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limits.max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or 'cannot be read'}") from None
    if len(data) > limits.max_bytes:
        raise ValueError(f"{path} is larger than {limits.max_bytes} bytes")
    return data


def _pairs(entry: _Entry) -> list[tuple[str, str]]:
    """Return questions and their answers, from the first question on and as long as they take turns."""
    said = [
        (message.sender or message.role or "", message.value or message.content or "")
        for message in entry.conversations or entry.messages
    ]
    first = next((index for index, (sender, _) in enumerate(said) if sender in _HUMANS), len(said))
    said = said[first:]
    pairs: list[tuple[str, str]] = []
    for (asker, question), (answerer, answer) in zip(said[::2], said[1::2], strict=False):
        if asker not in _HUMANS or answerer not in _MACHINES:
            break
        pairs.append((question, answer))
    return pairs


def _turns(
    pairs: Sequence[tuple[str, str]],
    counter: Callable[[str], int | None],
    outputs: Lengths | None,
    limits: FileLimits,
    generator: random.Random,
) -> tuple[Turn, ...]:
    """Return the turns that fit: all of a conversation's, or none."""
    turns: list[Turn] = []
    prompt_tokens = answered_tokens = 0
    for question, answer in pairs:
        # A tokenizer needs seconds for megabytes, and no token is longer than this.
        if len(question) > 64 * limits.max_prompt_tokens or len(answer) > 64 * limits.max_total_tokens:
            return ()
        asked = _tokens(question, counter)
        wanted = _tokens(answer, counter) if outputs is None else outputs.draw(generator)
        prompt_tokens += asked + answered_tokens
        answered_tokens = wanted
        if min(asked, wanted) < (limits.min_tokens if outputs is None else 1):
            return ()
        if prompt_tokens > limits.max_prompt_tokens or prompt_tokens + wanted > limits.max_total_tokens:
            return ()
        turns.append(Turn(question, wanted))
    return tuple(turns)


def _tokens(text: str, counter: Callable[[str], int | None]) -> int:
    known = counter(text)
    return len(text) // _CHARACTERS_PER_TOKEN if known is None else known
