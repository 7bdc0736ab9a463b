"""Names of the parsers for tool calls and reasoning: those of vLLM or of its plugins, where there is one.

The tokenizer service says which ones a model needs, the gateway has them."""

from __future__ import annotations

from typing import Literal, get_args

NO_PARSER = "none"

ToolParser = Literal[
    "none",
    "apriel",
    "cohere_command3",
    "deepseek_v3",
    "deepseek_v31",
    "functionary_v31",
    "gigachat3",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "hy_v3",
    "internlm",
    "jamba",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "llama_nemotron_json",
    "longcat",
    "mimo",
    "minimax",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "poolside_v1",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "step3p5",
    "xlam",
]
"""`none`: calls are not looked for. openai is gpt-oss."""

ReasoningParser = Literal[
    "none",
    "apriel",
    "cohere_command3",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "glm45",
    "glm47",
    "gptoss",
    "granite",
    "holo2",
    "hy_v3",
    "kimi_k2",
    "mimo",
    "minimax_m2",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "poolside_v1",
    "qwen3",
    "seed_oss",
    "step3",
    "step3p5",
]
"""`none`: reasoning stays in the content."""

TOOL_PARSERS = frozenset(get_args(ToolParser)) - {NO_PARSER}
REASONING_PARSERS = frozenset(get_args(ReasoningParser)) - {NO_PARSER}
