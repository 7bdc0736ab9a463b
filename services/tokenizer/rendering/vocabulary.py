"""Text to ids and back with a model's tokenizer, in the three ways that the service needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer

from services.tokenizer.rendering.control_tokens import ControlTokens, Piece
from services.tokenizer.rendering.cutting import TextCutter, token_bound
from services.tokenizer.rendering.files import ModelFiles, ModelFilesError, RenderRefused

# Encoded before a piece from the middle of a text where a tokenizer would put a prefix space before it.
_ANCHOR = "\n"
# A private-use character: no vocabulary has it as a token.
_UNKNOWN = "\U0010fffd"
# Characters of a text whose time is worth to be estimated, and of each sample for that.
_LONG_CHARS = 1 << 19
_SAMPLE_CHARS = 1 << 14


class Vocabulary:
    """A tokenizer of the `tokenizers` library without state between calls. Not for use by several threads.

    Raises ModelFilesError if tokenizer.json is not one.
    """

    def __init__(self, files: ModelFiles) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelFilesError(f"tokenizer.json is cut short or not a tokenizer: {reason}") from None
        # What a file was trained with; a server never cuts or fills a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.control = ControlTokens(added, self._tokenizer.normalizer)
        self.special_ids = tuple(sorted(index for index, token in added.items() if token.special))
        self.max_id = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bound = token_bound(files.tokenizer_json)
        self.cutter = TextCutter(files.tokenizer_json, self._whole, self._words)
        """Cuts texts of which only a part matters, before they are tokenized."""
        self._needs_anchor = self._run("x", anchored=True) != self._run("x", anchored=False)
        # The one control token that ordinary text may become: the one for what the vocabulary lacks.
        self._unknown = self.control.ids.intersection(self._pipeline(_UNKNOWN))
        self._bos_text = files.special_tokens.get("bos_token", "")
        self._bos = self._tokenizer.token_to_id(self._bos_text) if self._bos_text else None
        self._file_adds_bos = self._bos is not None and self._tokenizer.encode("x").ids[:1] == [self._bos]
        self._adds_bos = self._file_adds_bos if files.add_bos is None else files.add_bos
        self._before, self._after = self._frame()
        self.separates_pairs = len(self._tokenizer.encode("x", "y").ids) > 2 * len(self._whole("x"))
        """Whether it puts something around and between the texts of a pair."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`; spelled control tokens become themselves.

        A text that begins with the BOS does not get a second one.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if not add_special_tokens or self._bos is None:
            return ids
        wanted = self._adds_bos and not text.startswith(self._bos_text)
        if wanted == self._file_adds_bos:
            return ids
        return [self._bos, *ids] if wanted else ids[1:]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the ids of two texts as the tokenizer puts them together, and the index of the second one's
        first.

        It is 0 where the tokenizer gives both texts one type. Spelled control tokens become themselves.
        """
        encoding = self._tokenizer.encode(first, second)
        types: list[int] = encoding.type_ids
        return list(encoding.ids), types.index(1) if 1 in types else 0

    def without_last(self, text: str, count: int) -> str:
        """Return `text` cut where its last `count` tokens begin; empty if it has no more."""
        offsets: list[tuple[int, int]] = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[len(offsets) - count - 1][1]] if count < len(offsets) else ""

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Return the ids of a prompt in pieces: no added token arises from a plain one.

        Raises RenderRefused if the model's vocabulary leaves no other way to write a plain piece.
        """
        ids: list[int] = []
        # Spellings repeat: a prompt may hold one ten thousand times.
        known: dict[Piece, list[int]] = {}
        for position, piece in enumerate(pieces):
            if position == 0:
                ids += self._encode_piece(piece, anchored=False)
                continue
            if piece not in known:
                known[piece] = self._encode_piece(piece, anchored=self._needs_anchor)
            ids += known[piece]
        return ids

    def framed(self, ids: list[int], text: str) -> list[int]:
        """Return `ids` of `text`, with the tokens that `encode` puts around a text when it adds special
        tokens."""
        before = self._before[1:] if self._file_adds_bos else self._before
        if self._bos is not None and self._adds_bos and not text.startswith(self._bos_text):
            before = [self._bos, *before]
        return [*before, *ids, *self._after]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`, each in 0..max_id."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`; 0 where nothing is certain."""
        if self._bound is None:
            return 0
        normalizer = self._tokenizer.normalizer
        return self._bound.least_tokens(text if normalizer is None else normalizer.normalize_str(text))

    def seconds(self, text: str) -> float:
        """Return the processor time that tokenizing `text` takes, estimated by samples of it; 0 for a short
        text."""
        if len(text) < _LONG_CHARS:
            return 0.0
        starts = (0, (len(text) - _SAMPLE_CHARS) // 2, len(text) - _SAMPLE_CHARS)
        began = time.thread_time()
        for start in starts:
            self._whole(text[start : start + _SAMPLE_CHARS])
        return (time.thread_time() - began) * len(text) / (len(starts) * _SAMPLE_CHARS)

    def _encode_piece(self, piece: Piece, *, anchored: bool) -> list[int]:
        if not piece.is_plain:
            return self._run(piece.text, anchored=anchored)
        # A vocabulary may hold the spelling as an ordinary word too; its letters one by one never are.
        for parts in ([piece.text], list(piece.text)):
            ids = [index for part in parts for index in self._plain_run(part, anchored=anchored)]
            if self.control.ids.isdisjoint(set(ids) - self._unknown):
                return ids
        raise RenderRefused(
            "The messages spell a control token that this model's tokenizer cannot write as text.",
            param="messages",
        )

    def _frame(self) -> tuple[list[int], list[int]]:
        """Return the ids that the file's post-processor puts before and after a text."""
        whole: list[int] = self._tokenizer.encode("x").ids
        bare = self._whole("x")
        starts = range(len(whole) - len(bare) + 1)
        at = next((start for start in starts if whole[start : start + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]

    def _run(self, text: str, *, anchored: bool) -> list[int]:
        return _encode(self._whole, text, anchored=anchored)

    def _plain_run(self, text: str, *, anchored: bool) -> list[int]:
        return _encode(self._pipeline, text, anchored=anchored)

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _pipeline(self, text: str) -> list[int]:
        """Return the tokenizer without its added tokens."""
        return [token.id for word in self._words(text) for token in self._tokenizer.model.tokenize(word)]

    def _words(self, text: str) -> list[str]:
        """Return the words that the pre-tokenizer makes of the normalized text."""
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        if pre_tokenizer is None:
            return [text]
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _encode(encode: Callable[[str], list[int]], text: str, *, anchored: bool) -> list[int]:
    if anchored:
        prefix, whole = encode(_ANCHOR), encode(_ANCHOR + text)
        if whole[: len(prefix)] == prefix:
            return whole[len(prefix) :]
    return encode(text)
