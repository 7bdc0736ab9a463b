"""How families of models write tool calls, by the names that vLLM gave the parsers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gateway.parsing.output import IdStyle
from gateway.parsing.syntax import (
    Branch,
    CallList,
    CallObject,
    CallSequence,
    JsonArguments,
    Literal,
    PythonCalls,
    TaggedArguments,
    ToolFormat,
    Word,
    WordKind,
)


def _deepseek(words: str) -> str:
    """A token of DeepSeek's: in wide bars, its words joined by SentencePiece's mark for a space."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_CALL = _deepseek("tool call begin")
DEEPSEEK_SEPARATOR = _deepseek("tool sep")
DEEPSEEK_END = _deepseek("tool call end")
_DEEPSEEK_FRAMES = (_deepseek("tool calls begin"), _deepseek("tool calls end"), DEEPSEEK_END)

_HERMES = ToolFormat(
    "hermes",
    # What models add to the one object: a fence, a list, further objects, a brace too much.
    calls={
        "<tool_call>": (
            Literal("```json", optional=True),
            Branch({"[": (CallList(),), "": (CallSequence((",",), bare=True),)}),
            Literal("}", optional=True),
            Literal("```", optional=True),
            Literal("</tool_call>", optional=True),
        )
    },
)
_LLAMA = ToolFormat(
    "llama3_json",
    calls={"<|python_tag|>": (CallSequence((";", ",")),)},
    bare={"{": (CallSequence((";", ",")),)},
)
_MISTRAL = ToolFormat(
    "mistral",
    calls={
        "[TOOL_CALLS]": (
            Branch(
                {
                    "[": (CallList(),),
                    "{": (CallSequence((",",)),),
                    "": (
                        Word(WordKind.NAME, ("[CALL_ID]", "[ARGS]", "{")),
                        # Read up to the arguments, whatever marks them.
                        Branch(
                            {
                                "[": (Word(WordKind.OTHER, ("{",)), JsonArguments()),
                                "": (JsonArguments(),),
                            }
                        ),
                    ),
                }
            ),
        )
    },
    ids=IdStyle.NINE,
    ends_reasoning=True,
)
_PYTHONIC = ToolFormat(
    "pythonic",
    # Llama 4 writes JSON too.
    calls={
        "<|python_start|>": (
            Branch({"{": (CallSequence((";", ",")),), "": (PythonCalls(),)}),
            Literal("<|python_end|>", optional=True),
        )
    },
    bare={"[": (PythonCalls(),), "{": (CallSequence((";", ",")),)},
)
_QWEN_FUNCTION = (
    Word(WordKind.NAME, (">",)),
    Literal(">"),
    TaggedArguments(
        "<parameter=", ">", "", "</parameter>", ends=("</function>", "</tool_call>"), padded=True
    ),
    Literal("</function>", optional=True),
    Literal("</tool_call>", optional=True),
)
_QWEN_CODER = ToolFormat(
    "qwen3_coder",
    calls={
        "<tool_call>": (Literal("<function="), *_QWEN_FUNCTION),
        "<function=": _QWEN_FUNCTION,
    },
)
_SEED = ToolFormat(
    "seed_oss",
    calls={
        "<seed:tool_call>": (
            Literal("<function="),
            Word(WordKind.NAME, (">",)),
            Literal(">"),
            TaggedArguments(
                "<parameter=", ">", "", "</parameter>", ends=("</function>", "</seed:tool_call>")
            ),
            Literal("</function>", optional=True),
            Literal("</seed:tool_call>", optional=True),
        )
    },
    ends_reasoning=True,
)
_DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    calls={
        DEEPSEEK_CALL: (
            Word(WordKind.OTHER, (DEEPSEEK_SEPARATOR,)),
            Literal(DEEPSEEK_SEPARATOR),
            Word(WordKind.NAME, ("```", "\n", "{")),
            Literal("```json", optional=True),
            JsonArguments(("```", DEEPSEEK_END)),
            Literal("```", optional=True),
            Literal(DEEPSEEK_END, optional=True),
        )
    },
    frames=_DEEPSEEK_FRAMES,
    ends_reasoning=True,
)
_DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    calls={
        DEEPSEEK_CALL: (
            Word(WordKind.NAME, (DEEPSEEK_SEPARATOR, "{", DEEPSEEK_END)),
            Literal(DEEPSEEK_SEPARATOR, optional=True),
            JsonArguments((DEEPSEEK_END,)),
            Literal(DEEPSEEK_END, optional=True),
        )
    },
    frames=_DEEPSEEK_FRAMES,
    ends_reasoning=True,
)
_GRANITE_CALLS = Branch({"[": (CallList(),), "": (CallSequence((",",)),)})
_GRANITE = ToolFormat(
    "granite",
    calls={
        "<|tool_call|>": (_GRANITE_CALLS,),
        "<tool_call>": (_GRANITE_CALLS, Literal("</tool_call>", optional=True)),
        "<function_call>": (_GRANITE_CALLS,),
    },
)
_PHI = ToolFormat("phi4_mini_json", calls={"functools": (CallList(),)})
_GLM = ToolFormat(
    "glm45",
    calls={
        "<tool_call>": (
            Word(WordKind.NAME, ("\n", "<arg_key>", "</tool_call>")),
            TaggedArguments("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ends=("</tool_call>",)),
            Literal("</tool_call>", optional=True),
        )
    },
)
_KIMI = ToolFormat(
    "kimi_k2",
    calls={
        "<|tool_call_begin|>": (
            Word(WordKind.ID, ("<|tool_call_argument_begin|>", "{", "<|tool_call_end|>")),
            Literal("<|tool_call_argument_begin|>", optional=True),
            JsonArguments(("<|tool_call_end|>",)),
            Literal("<|tool_call_end|>", optional=True),
        )
    },
    frames=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"),
    ids=IdStyle.OWN,
    ends_reasoning=True,
)

JSON = ToolFormat("json", bare={"[": (CallList(),), "{": (CallObject(),)})
"""Calls as a constraint makes any model write them: an array of objects with name and parameters."""

HARMONY = "openai"
"""gpt-oss has channels rather than markers: harmony.py."""

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        **{
            form.name: form
            for form in (
                _HERMES,
                _LLAMA,
                _MISTRAL,
                _PYTHONIC,
                _QWEN_CODER,
                _SEED,
                _DEEPSEEK_V3,
                _DEEPSEEK_V31,
                _GRANITE,
                _PHI,
                _GLM,
                _KIMI,
            )
        },
        # vLLM's other names for the same.
        "llama4_json": _LLAMA,
        "llama4_pythonic": _PYTHONIC,
        "qwen3_xml": _QWEN_CODER,
    }
)
"""Tool formats by the parsers' names."""
