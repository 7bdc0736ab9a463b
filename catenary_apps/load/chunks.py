"""What the statistics need of a streamed chunk of a chat or a completion; all else is skipped unread."""

from __future__ import annotations

from typing import Annotated

import msgspec

# More than anything that could be true, and not too large for any sum or quotient.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class Usage(msgspec.Struct):
    """Tokens as the server counted them."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were not computed; None: not said."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


_NONE = msgspec.Raw(b"null")


class Chunk(msgspec.Struct):
    """One chunk. `error`, JSON, is what a server sends in place of more when it fails; some send the error
    itself, whose `object` says that it is one."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = _NONE
    object: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it is an error."""
        return self.object == "error" or (self.error is not _NONE and bytes(self.error) != b"null")

    @property
    def generated(self) -> bool:
        """Whether it brings anything that was generated: text, reasoning or a call."""
        for choice in self.choices or ():
            if choice.text:
                return True
            delta = choice.delta
            if delta is not None and (
                delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
            ):
                return True
        return False

    @property
    def finish_reason(self) -> str | None:
        """Why a choice ended, if one did."""
        return next((choice.finish_reason for choice in self.choices or () if choice.finish_reason), None)

    @property
    def text(self) -> str:
        """The text of the first choice, without its reasoning."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return choice.text or (choice.delta.content if choice.delta is not None else None) or ""


decode_chunk = msgspec.json.Decoder(Chunk).decode


class _ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorText | str | None = None
    message: str | None = None


def error_text(body: bytes, limit: int = 200) -> str:
    """The message of a refusal, in one line of at most `limit` characters."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
        inner = found.error.message if isinstance(found.error, _ErrorText) else found.error
        text = inner or found.message or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = ""
    return shown(text or body[: 4 * limit].decode("utf-8", "replace"), limit)


def shown(text: str, limit: int = 200) -> str:
    """A server's text in one line that does nothing to a terminal."""
    line = " ".join(text[: 4 * limit].split())[:limit]
    return (
        line
        if line.isprintable()
        else "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line)
    )
