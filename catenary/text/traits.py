"""What a tokenizer service tells of a model besides its tokenizer file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

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
        """The traits in a digest."""
        return cls(
            has_chat_template=digest.has_chat_template,
            template_variables=frozenset(digest.template_variables),
            tool_parser=digest.tool_parser,
            reasoning_parser=digest.reasoning_parser,
            response_template=digest.response_template,
            renders_pairs=digest.renders_pairs,
            reads_tools=digest.reads_tools,
        )
