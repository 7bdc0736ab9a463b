"""Names of the parsers for tool calls and reasoning: vLLM's, where it has such a one.

The tokenizer service says which ones a model needs, the gateway has them."""

from __future__ import annotations

from typing import Literal, get_args

NO_PARSER = "none"

ToolParser = Literal[
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
]
"""`none`: calls are not looked for. openai is gpt-oss."""

ReasoningParser = Literal[
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "gptoss",
    "granite",
    "kimi_k2",
    "mistral",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
]
"""`none`: reasoning stays in the content."""

TOOL_PARSERS = frozenset(get_args(ToolParser)) - {NO_PARSER}
REASONING_PARSERS = frozenset(get_args(ReasoningParser)) - {NO_PARSER}
