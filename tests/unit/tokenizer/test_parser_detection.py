"""Which parsers a chat template tells of. The texts are what templates of the families have in them."""

from __future__ import annotations

import pytest

from catenary.parsers import REASONING_PARSERS, TOOL_PARSERS
from gateway.parsing import REASONING_PARSERS as READ_REASONING
from gateway.parsing import TOOL_PARSERS as READ_TOOLS
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import Parsers, detect_parsers


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


QWEN = "<tools></tools> <tool_call>\n{{ name }}\n</tool_call>"
LLAMA = '<|start_header_id|>{{ role }}<|end_header_id|> "parameters": dictionary of argument name'
FAMILIES = {
    "Qwen 2.5": (QWEN, "hermes", ""),
    "Qwen 3": (QWEN + "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", "hermes", "qwen3"),
    "QwQ": (QWEN + "content.split('</think>')", "hermes", "deepseek_r1"),
    "Qwen 3 Coder": ("<tool_call>\n<function=NAME>\n<parameter=KEY>", "qwen3_coder", ""),
    "DeepSeek V3": (_deepseek("tool call begin") + "function" + "```json", "deepseek_v3", ""),
    "DeepSeek V3.1": (_deepseek("tool call begin") + "NAME </think>", "deepseek_v31", "deepseek_r1"),
    "Mistral": ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", ""),
    "Magistral": ("[THINK] [TOOL_CALLS]", "mistral", "mistral"),
    "GLM 4.5": ("<tool_call>{name}\n<arg_key> <think></think>", "glm45", "glm45"),
    "Kimi K2": ("<|tool_call_begin|>ID<|tool_call_argument_begin|><|im_middle|>", "kimi_k2", ""),
    "Kimi K2 Thinking": (
        "<|tool_call_argument_begin|><|im_middle|><think></think>",
        "kimi_k2",
        "kimi_k2",
    ),
    "gpt-oss": ("<|channel|>analysis<|message|> to=functions.", "openai", "gptoss"),
    "Granite 3.2": ("<|tool_call|> Here is my thought process: ", "granite", "granite"),
    "Phi 4 mini": ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json", ""),
    "Llama 3.1": (LLAMA + "<|python_tag|>", "llama3_json", ""),
    "Llama 3.2": (LLAMA, "llama3_json", ""),
    "Llama 4": (LLAMA + "[func_name1(params_name1=...)] <|python_start|>", "pythonic", ""),
    "SmolLM 2": ("<|im_start|>{{ role }}\n{{ content }}<|im_end|>", "", ""),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_tells_the_parsers(family: str) -> None:
    template, tool, reasoning = FAMILIES[family]
    assert detect_parsers([template]) == Parsers(tool, reasoning)
    assert detect_parsers(["plain", template]) == Parsers(tool, reasoning)


def test_the_operator_has_the_last_word() -> None:
    template = FAMILIES["Qwen 3"][0]
    assert detect_parsers([template], tool="none", reasoning="granite") == Parsers("", "granite")
    assert detect_parsers([], tool="mistral") == Parsers("mistral", "")
    assert detect_parsers([], response_template="{}") == Parsers(response_template="{}")
    assert detect_parsers([], response_template="{}", tool="hermes") == Parsers("hermes")


def test_names_are_those_of_the_gateways_parsers() -> None:
    assert TOOL_PARSERS == READ_TOOLS
    assert REASONING_PARSERS == READ_REASONING


@pytest.mark.parametrize("option", ["tool_parser", "reasoning_parser"])
def test_unknown_names_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"hermes|qwen3"):
        TokenizerConfig.model_validate({"model_dir": "/", option: "jamba"})
