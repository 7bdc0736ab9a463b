"""Calls as each family of models writes them, for any arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.parsed import Call

TYPES = {
    "text": "string",
    "number": "number",
    "flag": "boolean",
    "nothing": "null",
    "items": "array",
    "fields": "object",
}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
"""Of a function with a parameter of each JSON type."""

Write = Callable[[Sequence[Call]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, arguments: str = "arguments", name: str = "name") -> str:
    return _json({name: call.name, arguments: call.arguments})


def _each(begin: str, end: str, between: str = "\n") -> Write:
    """A block for each call."""
    return lambda calls: between.join(begin + _object(call) + end for call in calls)


def _list(begin: str, end: str, arguments: str = "arguments", name: str = "name") -> Write:
    """One block with an array of calls."""
    return lambda calls: begin + f"[{', '.join(_object(call, arguments, name) for call in calls)}]" + end


def _named(form: str, between: str = "") -> Write:
    """NAME, ARGUMENTS and NUMBER put into a text for each call."""

    def write(calls: Sequence[Call]) -> str:
        return between.join(
            form.replace("NAME", call.name)
            .replace("NUMBER", str(number))
            .replace("ARGUMENTS", _json(call.arguments))
            for number, call in enumerate(calls)
        )

    return write


def _tagged(form: str, parameter: str, before: str = "", after: str = "") -> Write:
    """NAME and PARAMETERS put into a text for each call; KEY and VALUE into one for each argument."""

    def write(calls: Sequence[Call]) -> str:
        texts = []
        for call in calls:
            values = [
                parameter.replace("KEY", key).replace(
                    "VALUE", value if isinstance(value, str) else _json(value)
                )
                for key, value in call.arguments.items()
            ]
            texts.append(form.replace("NAME", call.name).replace("PARAMETERS", "".join(values)))
        return before + "\n".join(texts) + after

    return write


def _python(call: Call) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _python_list(begin: str, end: str) -> Write:
    return lambda calls: f"{begin}[{', '.join(map(_python, calls))}]{end}"


def _bar(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _END = _bar("tool call begin"), _bar("tool call end")
_CODER = "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>"
WRITTEN: Mapping[str, Write] = {
    "hermes": _each("<tool_call>\n", "\n</tool_call>"),
    "llama3_json": lambda calls: "; ".join(_object(call, "parameters") for call in calls),
    "mistral": _list("[TOOL_CALLS]", ""),
    "pythonic": _python_list("", ""),
    "qwen3_coder": _tagged(_CODER, "<parameter=KEY>\nVALUE\n</parameter>\n"),
    "seed_oss": _tagged(
        _CODER.replace("tool_call>", "seed:tool_call>"), "<parameter=KEY>VALUE</parameter>\n"
    ),
    "deepseek_v3": _named(f"{_BEGIN}function{_bar('tool sep')}NAME\n```json\nARGUMENTS\n```{_END}", "\n"),
    "deepseek_v31": _named(f"{_BEGIN}NAME{_bar('tool sep')}ARGUMENTS{_END}"),
    "granite": _list("<|tool_call|>", ""),
    "phi4_mini_json": _list("functools", ""),
    "glm45": _tagged(
        "<tool_call>NAME\nPARAMETERS</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    "kimi_k2": _named(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
    ),
    "openai": _named(
        "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"
        "<|call|>"
    ),
    "apriel": _list("<tool_calls>", "</tool_calls>"),
    "minimax": lambda calls: "<tool_calls>\n" + "\n".join(map(_object, calls)) + "\n</tool_calls>",
    "nemotron_json": _list("<TOOLCALL>", "</TOOLCALL>"),
    "longcat": _each("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "lfm2": _python_list("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": lambda calls: f"<function_calls>{chr(10).join(map(_python, calls))}</function_calls>",
    "minimax_m2": _tagged(
        '<invoke name="NAME">\nPARAMETERS</invoke>',
        '<parameter name="KEY">VALUE</parameter>\n',
        "<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
    ),
    "hy_v3": _tagged(
        "<tool_call:opensource>NAME<tool_sep:opensource>\nPARAMETERS</tool_call:opensource>",
        "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n",
        "<tool_calls:opensource>\n",
        "\n</tool_calls:opensource>",
    ),
    "gigachat3": _each("<|function_call|>", "", between="<|message_sep|>\n\n"),
    "internlm": lambda calls: "\n".join(
        f"<|action_start|><|plugin|>\n{_object(call, 'parameters')}<|action_end|>" for call in calls
    ),
    "cohere_command3": _list("<|START_ACTION|>", "<|END_ACTION|>", "parameters", "tool_name"),
    "functionary_v31": _named("<function=NAME>ARGUMENTS</function>", "\n"),
    "xlam": _list("", ""),
    "json": _list("", "", "parameters"),
}
"""What a model of each format writes for some calls."""
BARE = frozenset({"llama3_json", "pythonic", "xlam", "json"})
"""Formats without a marker: nothing stands in front of a call."""
