"""Limits of a request that an operator sets."""

from __future__ import annotations

from dataclasses import dataclass

from catenary.schema import MAX_CONSTRAINT_BYTES


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Counts, lengths in characters for stop strings and bad words, and the range of priorities."""

    max_n: int = 16
    max_prompts: int = 128
    max_sequences: int = 256
    max_messages: int = 4096
    max_content_parts: int = 16384
    max_tools: int = 128
    max_tools_bytes: int = 1 << 20
    max_tool_calls: int = 4096
    max_documents: int = 1024
    max_json_depth: int = 64
    max_json_values: int = 200_000
    max_detokenize_ids: int = 262_144
    max_stop_length: int = 512
    max_stop_token_ids: int = 64
    max_embedding_inputs: int = 2048
    max_pairs: int = 1024
    max_constraint_bytes: int = MAX_CONSTRAINT_BYTES
    max_constraint_depth: int = 64
    max_constraint_values: int = 20_000
    max_constraint_choices: int = 1000
    max_logit_bias: int = 1024
    max_allowed_token_ids: int = 16384
    max_bad_words: int = 128
    max_bad_word_length: int = 128
    max_scored_prompt_tokens: int = 262_144
    min_priority: int = -100
    max_priority: int = 100

    @property
    def most_items(self) -> int:
        """Items of a valid request's arrays of messages, their parts and calls, and tools, together."""
        return self.max_messages + self.max_content_parts + self.max_tool_calls + 2 * self.max_tools
