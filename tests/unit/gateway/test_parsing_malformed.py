"""Outputs that depart a little from their format: what they say is read, and no markup is content."""

from __future__ import annotations

import json

import pytest

from gateway.parsing.formats import DEEPSEEK_CALL, DEEPSEEK_END, DEEPSEEK_SEPARATOR
from tests.support.parsed import Call, Output, read

NOW = Call("now", {})
_START = "<|start|>assistant"
_CALL = "commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"


def harmony(text: str, content: str = "", calls: tuple[Call, ...] = (NOW,), thought: str = "Hm.") -> Output:
    return Output("openai", text, content, calls, thought, "gptoss", _START)


HARMONY = [
    # Without the start of the next message.
    harmony(f"{_THOUGHT}<|channel|>{_CALL}"),
    harmony(f"{_THOUGHT}assistant<|channel|>{_CALL}"),
    harmony(f"{_THOUGHT} to=functions.now<|channel|>commentary<|message|>{{}}<|call|>"),
    harmony(f"{_THOUGHT}<|channel|>final<|message|>Done.<|end|><|channel|>{_CALL}", "Done."),
    harmony(f"{_THOUGHT}{_START}<|channel|>{_CALL}<|channel|>{_CALL}", calls=(NOW, NOW)),
    # Without the end of the message before.
    harmony("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", "Yes.", ()),
    harmony(f"<|channel|>analysis<|message|>Hm.{_START}<|channel|>{_CALL}"),
    # Without a header at all.
    harmony(f"{_THOUGHT}Hello there", "Hello there", ()),
    harmony(f"Sure.<|channel|>{_CALL}", "Sure.", thought=""),
    harmony(f"Hello<|end|>{_START}<|channel|>final<|message|> again", "Hello again", (), ""),
    harmony("<|end|><|end|>Hi<|return|>", "Hi", (), ""),
    # A header that is cut.
    harmony(f"{_THOUGHT}{_START}", "", ()),
    harmony(f"{_THOUGHT}<|start|>", "", ()),
    harmony(f"{_THOUGHT}{_START}<|channel|>comm", "", ()),
]

_KIMI = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>%s<|tool_call_end|>"
EMPTY = [
    Output("kimi_k2", _KIMI % "", "", (NOW,)),
    Output("kimi_k2", _KIMI % " \n", "", (NOW,)),
    Output("kimi_k2", _KIMI % "" + _KIMI % "{}", "", (NOW, NOW)),
    Output("deepseek_v31", f"{DEEPSEEK_CALL}now{DEEPSEEK_SEPARATOR}{DEEPSEEK_END}", "", (NOW,)),
    Output(
        "deepseek_v3",
        f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}now\n```json\n```{DEEPSEEK_END}",
        "",
        (NOW,),
    ),
]

_J = '{"name": "now", "arguments": {}}'
HERMES = [
    Output("hermes", f"<tool_call>{text}</tool_call>{behind}", behind, calls)
    for text, behind, calls in (
        (f"{_J}\n{_J}", "", (NOW, NOW)),
        (f"{_J},{_J}", "Done", (NOW, NOW)),
        (f"[{_J}, {_J}]", "", (NOW, NOW)),
        (f"```json\n{_J}\n```", "", (NOW,)),
        (_J[:-1] + "\n", "", (NOW,)),
        (_J[:-1] + ",}", "", (NOW,)),
        (_J + "}", "", (NOW,)),
        ('{"name": "now"}', "", (NOW,)),
        ('{"name": "now", "arguments": "{}"}', "", (NOW,)),
        ('{"arguments": null, "name": "now"}', "", (NOW,)),
    )
]
LISTS = [
    Output("mistral", f"[TOOL_CALLS] [{_J[:-1]}]", "", (NOW,)),
    Output("phi4_mini_json", f"functools[{_J}, {_J[:-1]}]", "", (NOW, NOW)),
    Output("granite", f"<|tool_call|>[{_J},]", "", (NOW,)),
]
# Without a separator, without an end, with ends too many.
_V31 = f"{DEEPSEEK_CALL}now"
MARKED = [
    Output("kimi_k2", "<|tool_call_begin|>functions.now:0{}<|tool_call_end|>", "", (NOW,)),
    Output("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_end|>", "", (NOW,)),
    Output("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}", "", (NOW,)),
    Output("kimi_k2", _KIMI % "{}" + "<|tool_call_end|>Done", "Done", (NOW,)),
    Output("kimi_k2", _KIMI % "{}<|tool_calls_section_end|>", "", (NOW,)),
    Output("deepseek_v31", _V31 + "{}" + DEEPSEEK_END, "", (NOW,)),
    Output("deepseek_v31", _V31 + DEEPSEEK_END, "", (NOW,)),
    Output("deepseek_v31", _V31 + DEEPSEEK_SEPARATOR + "{}" + DEEPSEEK_END * 2 + "Done", "Done", (NOW,)),
]

OUTPUTS = [*HARMONY, *EMPTY, *HERMES, *LISTS, *MARKED]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: f"{output.parser}-{output.text!r}")
def test_what_they_say_is_read(output: Output) -> None:
    content, reasoning, calls = whole = read(output, [output.text])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call.name, call.arguments) for call in output.calls
    ]
    assert (content, reasoning) == (output.content, output.reasoning)
    assert read(output, list(output.text)) == whole
