"""Formats in which families of models write tool calls, by the names that vLLM gave the parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

from gateway.parsing.output import IdStyle


@dataclass(frozen=True, slots=True)
class Literal:
    """Fixed text, with or without white space before it."""

    text: str
    optional: bool = False


class WordKind(Enum):
    """Meaning of a word."""

    NAME = "name"
    ID = "id"
    """Id like `functions.NAME:3`, which contains the name."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Word:
    """Text up to one of `until`, which is not read."""

    kind: WordKind
    until: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments as a JSON object; the name came before. One of `ends` in its place: there are none."""

    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallObject:
    """`{"name": ..., "arguments": {...}}`, in any order, also with `parameters`, or without any."""


@dataclass(frozen=True, slots=True)
class CallList:
    """JSON array of call objects, in which the function stands under the key `name`."""

    name: str = "name"


@dataclass(frozen=True, slots=True)
class CallSequence:
    """Call objects, one after the other, optionally separated by one of `separators`.

    `bare`: they may be without arguments."""

    separators: tuple[str, ...]
    bare: bool = False


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`[f(a=1), g()]`, where a call object may stand for a call.

    `until`: the calls stand without brackets and commas, up to this text, which is not read."""

    until: str = ""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Tags for each parameter: `key_open` NAME `key_close` `value_open` VALUE `value_close`.

    A value ends at its closing tag or, if that is missing, where the next key or one of `ends` begins."""

    key_open: str
    key_close: str
    value_open: str
    value_close: str
    ends: tuple[str, ...]
    padded: bool = False
    """Whether a value stands on lines of its own: the newlines around it are not part of it."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Steps of one call, and once more for each `again` that comes next, white space aside."""

    steps: Steps
    again: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps by the character that comes next, white space aside; `""`: any other."""

    steps: Mapping[str, Steps]


Step: TypeAlias = (
    Literal
    | Word
    | JsonArguments
    | CallObject
    | CallList
    | CallSequence
    | PythonCalls
    | TaggedArguments
    | Repeated
    | Branch
)
Steps: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a family of models writes its calls."""

    name: str
    calls: Mapping[str, Steps] = field(default_factory=dict)
    """Steps behind each marker that begins a call."""
    frames: tuple[str, ...] = ()
    """Markers around calls, which are dropped."""
    bare: Mapping[str, Steps] = field(default_factory=dict)
    """Steps of an answer that begins with this character, without a marker."""
    ids: IdStyle = IdStyle.CALL
    ends_reasoning: bool = False
    """Whether its markers are tokens that no model writes in prose: one of them ends reasoning left open."""
    parts: tuple[str, ...] = ()
    """Control tokens that are only a part of a marker, or end with white space."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers to look for in running text."""
        return (*self.calls, *self.frames)

    @property
    def texts(self) -> frozenset[str]:
        """All fixed texts that it reads: markers, and those between and behind them."""
        steps = (*self.calls.values(), *self.bare.values())
        return frozenset((*self.markers, *self.parts)).union(*map(_texts, steps))


def _texts(steps: Steps) -> frozenset[str]:
    found: set[str] = set()
    for step in steps:
        match step:
            case Literal():
                found.add(step.text)
            case Word():
                found.update(step.until)
            case TaggedArguments():
                found.update((step.key_open, step.key_close, step.value_open, step.value_close, *step.ends))
            case PythonCalls():
                found.add(step.until)
            case Repeated():
                found.update(_texts(step.steps))
            case Branch():
                found.update(*map(_texts, step.steps.values()))
    return frozenset(found) - {""}


def _deepseek(words: str) -> str:
    """Return a token of DeepSeek's: in wide bars, its words joined by SentencePiece's mark for a space."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_CALL = _deepseek("tool call begin")
DEEPSEEK_SEPARATOR = _deepseek("tool sep")
DEEPSEEK_END = _deepseek("tool call end")
_DEEPSEEK_FRAMES = (_deepseek("tool calls begin"), _deepseek("tool calls end"), DEEPSEEK_END)

_HERMES = ToolFormat(
    "hermes",
    # Models add to the one object: a fence, a list, further objects, an extra brace.
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
        # These models sometimes write the JSON of their predecessors.
        "<tool_call>": (
            Branch(
                {
                    "{": (CallSequence((",",)), Literal("</tool_call>", optional=True)),
                    "": (Literal("<function="), *_QWEN_FUNCTION),
                }
            ),
        ),
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
_ANY_OBJECTS = Branch({"[": (CallList(),), "": (CallSequence((",",), bare=True),)})


def _enclosed(begin: str, end: str, content: Branch = _ANY_OBJECTS) -> Mapping[str, Steps]:
    """Return steps for calls between two texts, the second of which may be missing."""
    return {begin: (content, Literal(end, optional=True))}


_TOOL_CALLS = _enclosed("<tool_calls>", "</tool_calls>")
_APRIEL = ToolFormat("apriel", calls=_TOOL_CALLS)
_MINIMAX = ToolFormat("minimax", calls=_TOOL_CALLS)
_NEMOTRON = ToolFormat("nemotron_json", calls=_enclosed("<TOOLCALL>", "</TOOLCALL>"))
_LONGCAT = ToolFormat(
    "longcat", calls=_enclosed("<longcat_tool_call>", "</longcat_tool_call>"), ends_reasoning=True
)
_LFM = ToolFormat(
    "lfm2",
    calls=_enclosed(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        Branch({"{": (CallSequence((",",), bare=True),), "": (PythonCalls(),)}),
    ),
    ends_reasoning=True,
)
_OLMO = ToolFormat(
    "olmo3",
    calls={
        "<function_calls>": (PythonCalls("</function_calls>"), Literal("</function_calls>", optional=True))
    },
)
_MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    calls={
        "<minimax:tool_call>": (
            Repeated(
                (
                    Literal('<invoke name="'),
                    Word(WordKind.NAME, ('"',)),
                    Literal('">'),
                    TaggedArguments(
                        '<parameter name="',
                        '">',
                        "",
                        "</parameter>",
                        ends=("</invoke>", "</minimax:tool_call>"),
                    ),
                    Literal("</invoke>", optional=True),
                ),
                again='<invoke name="',
            ),
            Literal("</minimax:tool_call>", optional=True),
        )
    },
    ends_reasoning=True,
)
_HUNYUAN = ToolFormat(
    "hy_v3",
    calls={
        "<tool_call:opensource>": (
            Word(WordKind.NAME, ("<tool_sep:opensource>", "<arg_key:opensource>", "</tool_call:opensource>")),
            Literal("<tool_sep:opensource>", optional=True),
            TaggedArguments(
                "<arg_key:opensource>",
                "</arg_key:opensource>",
                "<arg_value:opensource>",
                "</arg_value:opensource>",
                ends=("</tool_call:opensource>",),
            ),
            Literal("</tool_call:opensource>", optional=True),
        )
    },
    frames=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ends_reasoning=True,
)
_GIGACHAT = ToolFormat(
    "gigachat3",
    # The first one is a role of its own, behind the end of the message before.
    calls={"function call<|role_sep|>": (CallObject(),), "<|function_call|>": (CallObject(),)},
    frames=("<|message_sep|>",),
    ends_reasoning=True,
    parts=("<|role_sep|>", "<|role_sep|>\n", "<|message_sep|>\n\n"),
)
_INTERNLM = ToolFormat(
    "internlm",
    calls={
        "<|action_start|>": (
            Literal("<|plugin|>"),
            CallObject(),
            Literal("<|action_end|>", optional=True),
        )
    },
    ends_reasoning=True,
)
_COHERE = ToolFormat(
    "cohere_command3",
    calls=_enclosed("<|START_ACTION|>", "<|END_ACTION|>", Branch({"[": (CallList("tool_name"),)})),
    frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ends_reasoning=True,
)
_FUNCTIONARY = ToolFormat(
    "functionary_v31",
    calls={
        "<function=": (
            Word(WordKind.NAME, (">",)),
            Literal(">"),
            JsonArguments(("</function>",)),
            Literal("</function>", optional=True),
        )
    },
)
_XLAM = ToolFormat(
    "xlam",
    calls={
        **_enclosed("<tool_call>", "</tool_call>"),
        "[TOOL_CALLS]": (_ANY_OBJECTS,),
    },
    bare={
        "[": (CallList(),),
        "`": (Literal("```json"), Branch({"[": (CallList(),)}), Literal("```", optional=True)),
    },
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
                _APRIEL,
                _MINIMAX,
                _NEMOTRON,
                _LONGCAT,
                _LFM,
                _OLMO,
                _MINIMAX_M2,
                _HUNYUAN,
                _GIGACHAT,
                _INTERNLM,
                _COHERE,
                _FUNCTIONARY,
                _XLAM,
            )
        },
        # Other names for the same, most of them vLLM's.
        "glm47": _GLM,
        "granite-20b-fc": _GRANITE,
        "granite4": _HERMES,
        "jamba": _APRIEL,
        "llama4_json": _LLAMA,
        "llama4_pythonic": _PYTHONIC,
        "llama_nemotron_json": _NEMOTRON,
        "mimo": _QWEN_CODER,
        "poolside_v1": _GLM,
        "qwen3_xml": _QWEN_CODER,
        "step3p5": _QWEN_CODER,
    }
)
"""Tool formats by the parsers' names."""
