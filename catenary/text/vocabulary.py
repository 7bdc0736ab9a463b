"""The vocabulary of a model's tokenizer: the text of an id, alone and in a stream."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from tokenizers import Tokenizer

from catenary.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from catenary.v1 import tokenizer_pb2


@dataclass(frozen=True, slots=True)
class TokenizerTraits:
    """As in `TokenizerDigest`, whose comments in protos/catenary/v1/tokenizer.proto say what they mean."""

    has_chat_template: bool = False
    template_variables: frozenset[str] = frozenset()
    tool_parser: str = ""
    reasoning_parser: str = ""
    response_template: str = ""
    renders_pairs: bool = False
    reads_tools: bool = False

    @classmethod
    def of(cls, digest: tokenizer_pb2.TokenizerDigest) -> Self:
        """Return the traits in a digest."""
        return cls(
            has_chat_template=digest.has_chat_template,
            template_variables=frozenset(digest.template_variables),
            tool_parser=digest.tool_parser,
            reasoning_parser=digest.reasoning_parser,
            response_template=digest.response_template,
            renders_pairs=digest.renders_pairs,
            reads_tools=digest.reads_tools,
        )


_SPACE_MARK = "\u2581"


class _DecoderField(msgspec.Struct):
    decoder: Any = None


class Vocabulary:
    """A tokenizer file, ready to decode with. Reads `tokenizer.json`; raises ValueError if it is none.

    `sha256` is the file's checksum. Control tokens (`special_ids` and those that the file marks) are left
    out of visible text."""

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        sha256: str,
        special_ids: Iterable[int] = (),
        traits: TokenizerTraits | None = None,
    ) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
            decoder = msgspec.json.decode(tokenizer_json, type=_DecoderField).decoder
        except Exception as error:  # the library raises bare Exception
            raise ValueError("not a tokenizer file") from error
        self.sha256 = sha256
        self.traits = TokenizerTraits() if traits is None else traits
        self._byte_level = _is_byte_level(decoder)
        self._single_bytes = self._find_bytes() if _falls_back(decoder) else {}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(special_ids) | {index for index, token in added.items() if token.special}
        self._added = frozenset(added)
        self._cache: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; empty for an id that the tokenizer does not know."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._read_bytes(token_id)
        return found

    def visible_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, empty for a control token."""
        return b"" if token_id in self._special else self.token_bytes(token_id)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens."""
        return self._special

    def special_named(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of the control tokens that read like this."""
        ids = (self._tokenizer.token_to_id(text) for text in texts)
        return self._special.intersection(ids)

    def detokenizer(
        self, prompt: Sequence[int], *, shown: Container[int] = frozenset(), spaced: bool = True
    ) -> Detokenizer:
        """Return a decoder for one sequence that continues `prompt`.

        Args:
            prompt: ids.
            shown: control tokens that are visible.
            spaced: an added token right after another one is written as the decoder does it, maybe with a
                space; else without.
        """
        if self._byte_level:
            return ByteDetokenizer(self._reader(shown), prompt)
        glued = frozenset() if spaced else self._added
        single = self._single_byte if self._single_bytes else None
        return WindowDetokenizer(self._decode, self._hider(shown), self.token_bytes, prompt, glued, single)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text by itself; text that spells a control token is that token."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def shortened(self, text: str, tokens: int) -> str:
        """Return a beginning of a text that has at most so many tokens by itself, cut where one of them ends;
        at least a character."""
        while len(text) > 1:
            ends = [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets]
            if len(ends) <= tokens:
                break
            # Again: without what followed it, the end may be other tokens.
            text = text[: max(1, min(ends[tokens - 1], len(text) - 1))]
        return text

    def _reader(self, shown: Container[int]) -> Callable[[int], bytes]:
        if not shown:
            return self.visible_bytes

        def read(token_id: int) -> bytes:
            hidden = token_id in self._special and token_id not in shown
            return b"" if hidden else self.token_bytes(token_id)

        return read

    def _hider(self, shown: Container[int]) -> Callable[[int], bool]:
        if not shown:
            return self.is_special
        return lambda token_id: token_id in self._special and token_id not in shown

    def spellings(self, ids: Iterable[int]) -> list[str]:
        """Return how the tokenizer file spells each token; empty for an id that it does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the visible text of `ids`, all at once, as the tokenizer file's decoder has it."""
        return self._decode([token_id for token_id in ids if token_id not in self._special])

    def _single_byte(self, token_id: int) -> bytes:
        """Return the byte that a token of byte fallback stands for; empty for any other token."""
        return self._single_bytes.get(token_id, b"")

    def _find_bytes(self) -> dict[int, bytes]:
        ids = ((self._tokenizer.token_to_id(f"<0x{byte:02X}>"), bytes((byte,))) for byte in range(256))
        found = {token_id: byte for token_id, byte in ids if token_id is not None}
        # A file that lacks some cannot spell all texts, U+FFFD among them.
        return found if len(found) == 256 else {}

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _read_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _bytes_of_byte_level(token)
        if token_id in self._added:
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE_MARK, " ").encode()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders") or []
        return len(inner) == 1 and _is_byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"


def _falls_back(decoder: Any) -> bool:
    """Whether a decoder reads tokens like `<0x0A>` as bytes."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return any(map(_falls_back, decoder.get("decoders") or []))
    return decoder.get("type") == "ByteFallback"


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if chr(value) not in alphabet)
    alphabet.update({chr(256 + index): value for index, value in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    """Return the bytes of a token, which is wholly in the alphabet or, if added, perhaps plain text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
