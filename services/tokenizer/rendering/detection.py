"""Which parsers a model's answers need, told by its chat templates.

A template shows the model's own calls and thoughts when it renders an assistant's earlier turns, so the marks
of their format stand in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catenary.parsers import NO_PARSER


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names from catenary/parsers.py; empty: none."""

    tool: str = ""
    reasoning: str = ""
    response_template: str = ""
    """JSON that describes them better than the names, unless an operator named any."""


@dataclass(frozen=True, slots=True)
class _Sign:
    """A parser, and texts that all stand in the templates of its models."""

    parser: str
    texts: tuple[str, ...]


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


# The first that fits counts: what stands further down is in the templates of several families.
_TOOLS = (
    _Sign("kimi_k2", ("<|tool_call_argument_begin|>",)),
    _Sign("openai", ("<|channel|>", "<|constrain|>")),
    _Sign("openai", ("<|channel|>", "to=functions.")),
    _Sign("deepseek_v3", (_deepseek("tool call begin"), "```json")),
    _Sign("deepseek_v31", (_deepseek("tool call begin"),)),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("qwen3_coder", ("<function=", "<parameter=")),
    _Sign("glm45", ("<tool_call>", "<arg_key>")),
    _Sign("pythonic", ("<|python_start|>",)),
    # How Meta and others explain the format in the system's message.
    _Sign("pythonic", ("[func_name1(",)),
    _Sign("granite", ("<|tool_call|>",)),
    _Sign("phi4_mini_json", ("functools[",)),
    _Sign("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    _Sign("llama3_json", ("<|python_tag|>",)),
    _Sign("llama3_json", ("<|start_header_id|>", '"parameters":')),
    _Sign("hermes", ("<tool_call>",)),
)
_REASONING = (
    _Sign("gptoss", ("<|channel|>", "analysis")),
    _Sign("mistral", ("[THINK]",)),
    _Sign("granite", ("Here is my thought process:",)),
    _Sign("glm45", ("</think>", "<arg_key>")),
    _Sign("kimi_k2", ("</think>", "<|im_middle|>")),
    _Sign("qwen3", ("</think>", "enable_thinking")),
    _Sign("deepseek_r1", ("</think>",)),
)


def detect_parsers(
    templates: Iterable[str],
    *,
    response_template: str = "",
    tool: str | None = None,
    reasoning: str | None = None,
) -> Parsers:
    """The parsers for a model with these chat templates, and maybe a response template.

    `tool` and `reasoning` are what the operator says instead: a name, or `none`."""
    text = "\n".join(templates)
    return Parsers(
        _chosen(tool, _TOOLS, text),
        _chosen(reasoning, _REASONING, text),
        response_template if tool is None and reasoning is None else "",
    )


def _chosen(name: str | None, signs: tuple[_Sign, ...], text: str) -> str:
    if name is not None:
        return "" if name == NO_PARSER else name
    return next((sign.parser for sign in signs if all(each in text for each in sign.texts)), "")
