"""Outputs that depart a little from their format: what they say is read, and no markup is content."""

from __future__ import annotations

import json

import pytest

from gateway.parsing.formats import DEEPSEEK_CALL, DEEPSEEK_END, DEEPSEEK_SEPARATOR
from tests.support.parsed import PARIS, Call, Output, P, read

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

_WEATHER = "<tool_call>\n<function=get_weather>\n"
_END = "</function>\n</tool_call>"
_CITY = "<parameter=city>\nParis\n</parameter>\n"
CODER = [
    Output("qwen3_coder", text, content, calls)
    for text, content, calls in (
        # The JSON of an older model, alone and twice.
        (f"<tool_call>\n{_J}\n</tool_call>", "", (NOW,)),
        (f"Ok.<tool_call>{_J}</tool_call>\n<tool_call>{_J}</tool_call>", "Ok.", (NOW, NOW)),
        ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', ()),
        # Ends that are missing, doubled or of another call.
        (_WEATHER + _CITY + "</tool_call>", "", (PARIS,)),
        (_WEATHER + _CITY.replace("</parameter>\n", "") + _END, "", (PARIS,)),
        (_WEATHER + _CITY + _END + "\n</tool_call>", "</tool_call>", (PARIS,)),
        (
            f"<tool_call>\n<function=now>\n</function>\n<function=get_weather>\n{_CITY}{_END}",
            "",
            (NOW, PARIS),
        ),
        (_WEATHER + _CITY + "</functio", "", (PARIS,)),
        # Values that are empty, or of another type than the schema's.
        (_WEATHER + "<parameter=city></parameter>\n" + _END, "", (Call("get_weather", {"city": ""}),)),
        (
            _WEATHER + "<parameter=days>\nthree\n</parameter>\n" + _END,
            "",
            (Call("get_weather", {"days": "three"}),),
        ),
        (
            _WEATHER + "<parameter=hourly>True</parameter><parameter=note>null</parameter>" + _END,
            "",
            (Call("get_weather", {"hourly": True, "note": None}),),
        ),
        # What is no call: a name that is missing or none, other tags, a word in prose, a call that is cut.
        ("<tool_call>\n<function=>\n" + _END, "<tool_call>\n<function=>\n" + _END, ()),
        ("<tool_call><function=now/></tool_call>", "<tool_call><function=now/></tool_call>", ()),
        (
            f'<tool_call>\n<function name="now">\n{_END}',
            f'<tool_call>\n<function name="now">\n{_END}',
            (),
        ),
        ("Use <function=foo> in text.", "Use <function=foo> in text.", ()),
        (_WEATHER + "<param", _WEATHER + "<param", ()),
    )
]
_TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
_BARE_TO = "<|channel|>commentary to=%s<|constrain|>json<|message|>%s<|call|>"
HEADERS = [
    harmony(text, content, calls, thought)
    for text, content, calls, thought in (
        # The function without its namespace; a tool of the model's own is no function of the request.
        (_BARE_TO % ("get_weather ", P), "", (PARIS,), ""),
        (_BARE_TO % ("python ", "1 + 1"), "", (), "1 + 1"),
        (_BARE_TO % ("functions.", "{}"), "", (), "{}"),
        # Arguments in a fence, none at all, and what are none: no call is made up.
        (_TO + f"```json\n{P}\n```<|call|>", "", (PARIS,), ""),
        (_TO + f"```json\n{P}", "", (PARIS,), ""),
        (_TO + "<|call|>", "", (Call("get_weather", {}),), ""),
        (_TO + "city=Paris<|call|>", _TO + "city=Paris", (), ""),
        (_TO + "[1]<|end|>", _TO + "[1]", (), ""),
        (_TO, _TO, (), ""),
        # Other channels, other order, a second object.
        (_TO.replace("commentary", "analysis") + P, "", (PARIS,), ""),
        (_TO.replace("commentary", "final") + P, "", (PARIS,), ""),
        (f"<|channel|>commentary to=functions.now{_TO[:21]} <|message|>{{}}", "", (NOW,), ""),
        (_TO + P + P, P, (PARIS,), ""),
        (_TO + '{"city": "Paris"}<|call|><|channel|>final<|message|>Hi', "Hi", (PARIS,), ""),
    )
]
_W = f'{{"name": "get_weather", "arguments": {P}}}'
MISTRAL = [
    Output("mistral", text, content, calls)
    for text, content, calls in (
        (f"[TOOL_CALLS] [{_W}", "", (PARIS,)),
        (f"[TOOL_CALLS]{_W}, {_J}", "", (PARIS, NOW)),
        (f"[TOOL_CALLS]get_weather[ARGS]{P}[TOOL_CALLS]now[ARGS]{{}}", "", (PARIS, NOW)),
        (f"[TOOL_CALLS]get_weather [CALL_ID]abcdefghi [ARGS] {P}", "", (PARIS,)),
        (f'[TOOL_CALLS][{_W}, {{"name": "now"}}] So.', "So.", (PARIS, NOW)),
        (
            '[TOOL_CALLS][{"name": "now", "arguments": ""}, {"arguments": null, "name": "now"}]',
            "",
            (NOW, NOW),
        ),
        (
            '[TOOL_CALLS][{"name": "run_code", "arguments": {"source": "a\n[TOOL_CALLS]\\"]}"}}]',
            "",
            (Call("run_code", {"source": 'a\n[TOOL_CALLS]"]}'}),),
        ),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", ()),
        ("[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS]now[ARGS]", ()),
        ("[TOOL_CALLS]now[ARGS]no JSON", "[TOOL_CALLS]now[ARGS]no JSON", ()),
        ("[TOOL_CALLS]no name[ARGS]{}", "[TOOL_CALLS]no name[ARGS]{}", ()),
        ("[TOOL_CALLS][{'name': 'now'}]", "[TOOL_CALLS][{'name': 'now'}]", ()),
        ("[TOOL_CALLS][[]]", "[TOOL_CALLS][[]]", ()),
        ("[TOOL_CALL] and [TOOL_CALLS", "[TOOL_CALL] and [TOOL_CALLS", ()),
    )
]

OUTPUTS = [*HARMONY, *EMPTY, *HERMES, *LISTS, *MARKED, *CODER, *HEADERS, *MISTRAL]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: f"{output.parser}-{output.text!r}")
def test_what_they_say_is_read(output: Output) -> None:
    content, reasoning, calls = whole = read(output, [output.text])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call.name, call.arguments) for call in output.calls
    ]
    assert (content, reasoning) == (output.content, output.reasoning)
    assert read(output, list(output.text)) == whole
