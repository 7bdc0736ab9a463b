"""Parts of a format that a constraint needs, so that calls of required, named and strict tools are written as
the model's parser reads them."""

from __future__ import annotations

from typing import NamedTuple

from gateway.parsing import formats
from gateway.parsing.formats import FORMATS


class Tag(NamedTuple):
    """Call of one function: the text around its arguments, which are a JSON value.

    `begin` begins with `trigger`, after which a model must go on with one of the calls. Some of the texts are
    control tokens of the models that write them."""

    trigger: str
    begin: str
    end: str


_NAME = "NAME"
_DEEPSEEK = formats.DEEPSEEK_CALL, formats.DEEPSEEK_SEPARATOR, formats.DEEPSEEK_END
_TAGS = {
    "hermes": Tag("<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    "llama3_json": Tag('{"name": ', '{"name": "NAME", "parameters": ', "}"),
    "mistral": Tag("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "NAME", "arguments": ', "}]"),
    "granite": Tag("<|tool_call|>", '<|tool_call|>[{"name": "NAME", "arguments": ', "}]"),
    "phi4_mini_json": Tag("functools", 'functools[{"name": "NAME", "arguments": ', "}]"),
    "deepseek_v3": Tag(
        _DEEPSEEK[0], f"{_DEEPSEEK[0]}function{_DEEPSEEK[1]}NAME\n```json\n", f"\n```{_DEEPSEEK[2]}"
    ),
    "deepseek_v31": Tag(_DEEPSEEK[0], f"{_DEEPSEEK[0]}NAME{_DEEPSEEK[1]}", _DEEPSEEK[2]),
    "kimi_k2": Tag(
        "<|tool_call_begin|>",
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "apriel": Tag("<tool_calls>", '<tool_calls>[{"name": "NAME", "arguments": ', "}]</tool_calls>"),
    "minimax": Tag("<tool_calls>", '<tool_calls>\n{"name": "NAME", "arguments": ', "}\n</tool_calls>"),
    "nemotron_json": Tag("<TOOLCALL>", '<TOOLCALL>[{"name": "NAME", "arguments": ', "}]</TOOLCALL>"),
    "longcat": Tag(
        "<longcat_tool_call>",
        '<longcat_tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</longcat_tool_call>",
    ),
    # Its calls are Python, unless the system's message asks for JSON.
    "lfm2": Tag(
        "<|tool_call_start|>",
        '<|tool_call_start|>[{"name": "NAME", "arguments": ',
        "}]<|tool_call_end|>",
    ),
    "gigachat3": Tag("<|function_call|>", '<|function_call|>{"name": "NAME", "arguments": ', "}"),
    "internlm": Tag(
        "<|action_start|>",
        '<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ',
        "}<|action_end|>",
    ),
    "cohere_command3": Tag(
        "<|START_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
        "}\n]<|END_ACTION|>",
    ),
    "functionary_v31": Tag("<function=", "<function=NAME>", "</function>"),
    formats.HARMONY: Tag(
        "<|channel|>commentary to=",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "<|call|>",
    ),
}


class TaggedFormat(NamedTuple):
    """Call of one function whose arguments have a tag each.

    The text around all of them is as in `Tag`. `value_begin` stands in front of a value, with KEY for the
    parameter's name, and `value_end` behind it; no value may contain one of `without`, where its reader would
    end."""

    trigger: str
    begin: str
    end: str
    value_begin: str
    value_end: str
    without: tuple[str, ...]


_KEY = "KEY"
_TAGGED = {
    "qwen3_coder": TaggedFormat(
        "<tool_call>",
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        "<parameter=KEY>\n",
        "\n</parameter>\n",
        ("<parameter=", "</parameter>", "</function>", "</tool_call>"),
    ),
    "seed_oss": TaggedFormat(
        "<seed:tool_call>",
        "<seed:tool_call>\n<function=NAME>\n",
        "</function>\n</seed:tool_call>",
        "<parameter=KEY>",
        "</parameter>\n",
        ("<parameter=", "</parameter>", "</function>", "</seed:tool_call>"),
    ),
    "glm45": TaggedFormat(
        "<tool_call>",
        "<tool_call>NAME\n",
        "</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>",
        "</arg_value>\n",
        ("<arg_key>", "</arg_value>", "</tool_call>"),
    ),
    "minimax_m2": TaggedFormat(
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="NAME">\n',
        "</invoke>\n</minimax:tool_call>",
        '<parameter name="KEY">',
        "</parameter>\n",
        ('<parameter name="', "</parameter>", "</invoke>", "</minimax:tool_call>"),
    ),
    "hy_v3": TaggedFormat(
        "<tool_call:opensource>",
        "<tool_call:opensource>NAME<tool_sep:opensource>\n",
        "</tool_call:opensource>",
        "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
        ("<arg_key:opensource>", "</arg_value:opensource>", "</tool_call:opensource>"),
    ),
}


def tagged_for(parser: str, name: str) -> TaggedFormat | None:
    """Return the tags of a call of function `name` for a tool parser whose arguments have some; else None."""
    form = FORMATS.get(parser)
    tagged = None if form is None else _TAGGED.get(form.name)
    return None if tagged is None else tagged._replace(begin=tagged.begin.replace(_NAME, name))


def value_begin(tagged: TaggedFormat, key: str) -> str:
    """Return the text in front of the value of parameter `key`."""
    return tagged.value_begin.replace(_KEY, key)


def tag_for(parser: str, name: str) -> Tag | None:
    """Return the tag of a call of function `name` for tool parser `parser`; None if its arguments are not
    JSON.

    Then a constraint has the calls written as an array of `{"name", "parameters"}`, for parser `json`."""
    form = FORMATS.get(parser)
    tag = _TAGS.get(parser if form is None else form.name)
    return None if tag is None else tag._replace(begin=tag.begin.replace(_NAME, name))
