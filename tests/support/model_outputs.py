"""Answers as real models write them, by the parser that reads them, and what is in them."""

# Texts stand as models write them, also where that is long.
# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "hourly": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"type": "string"}},
        "address": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}]},
        "price": {"type": "number"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "comment": {},
    },
    "$defs": {"Address": {"type": "object", "properties": {"zip": {"type": "string"}}}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
CODE: dict[str, Any] = {"type": "object", "properties": {"source": {"type": "string"}}}
SCHEMAS = {"get_weather": WEATHER, "place_order": ORDER, "now": NOTHING, "run_code": CODE}


@dataclass(frozen=True)
class Call:
    """A call: its name and its arguments, as a value."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Output:
    """A text and what it says. `tail`: the prompt's end."""

    parser: str
    text: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    thinks: str = ""
    tail: str = "<|im_start|>assistant\n"


PARIS = Call("get_weather", {"city": "Paris"})
ROME = Call("get_weather", {"city": "Rome", "days": 3})


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL, _SEP, _CLOSE = _deepseek("tool call begin"), _deepseek("tool sep"), _deepseek("tool call end")
_P, _R = '{"city": "Paris"}', '{"city": "Rome", "days": 3}'


def _v3(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CLOSE}"


def _v31(name: str, arguments: str) -> str:
    return f"{_CALL}{name}{_SEP}{arguments}{_CLOSE}"


def _kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

HERMES = [
    Output(
        "hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {_P}}}\n</tool_call>', "", (PARIS,)
    ),
    Output(
        "hermes",
        f'I will look.\n<tool_call>\n{{"name": "get_weather", "arguments": {_P}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_R}}}\n</tool_call>',
        "I will look.",
        (PARIS, ROME),
    ),
    # Arguments before the name (vLLM 9693), and arguments as text.
    Output("hermes", f'<tool_call>{{"arguments": {_R}, "name": "get_weather"}}</tool_call>', "", (ROME,)),
    Output(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n</tool_call>',
        "",
        (PARIS,),
    ),
    # No closing tag at the end, and none between two calls.
    Output("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {_P}}}\n', "", (PARIS,)),
    Output(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {_P}}}'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "",
        (PARIS, Call("now", {})),
    ),
    Output("hermes", "2 < 3, <b>bold</b>, <tool> and <tool_cal", "2 < 3, <b>bold</b>, <tool> and <tool_cal"),
    Output("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>\nDone.', "Done.", (Call("now", {}),)),
    Output("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>"),
    Output(
        "hermes",
        '<tool_call>\n{"name": "run_code", "arguments": {"source": "a\nb\\u00e9 </tool_call> {"}}\n</tool_call>',
        "",
        (Call("run_code", {"source": "a\nb\u00e9 </tool_call> {"}),),
    ),
    Output(
        "hermes",
        f'<think>\nParis, I guess.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {_P}}}\n</tool_call>',
        "",
        (PARIS,),
        "Paris, I guess.",
        "qwen3",
    ),
]
LLAMA = [
    Output("llama3_json", f'{{"name": "get_weather", "parameters": {_P}}}', "", (PARIS,)),
    Output(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {_P}}}; {{"name": "get_weather", "parameters": {_R}}}',
        "",
        (PARIS, ROME),
    ),
    Output("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {_P}}}', "", (PARIS,)),
    Output(
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "parameters": {_R}}}',
        "",
        (ROME,),
    ),
    Output("llama3_json", '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}'),
    Output("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Output("llama3_json", "The weather is {fine}.", "The weather is {fine}."),
    Output("llama3_json", f'\n{{"name": "get_weather", "arguments": {_P}}}\n', "", (PARIS,)),
]
MISTRAL = [
    Output("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_P}}}]', "", (PARIS,)),
    Output(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_P}, "id": "a1b2c3d4e"}}, '
        f'{{"name": "get_weather", "arguments": {_R}}}]',
        "",
        (PARIS, ROME),
    ),
    Output("mistral", f"[TOOL_CALLS]get_weather{_P}", "", (PARIS,)),
    Output("mistral", f"[TOOL_CALLS]get_weather{_P}[TOOL_CALLS]get_weather{_R}", "", (PARIS, ROME)),
    Output("mistral", f"Sure. [TOOL_CALLS]get_weather[ARGS]{_R}", "Sure.", (ROME,)),
    Output("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]XkX0aVJ2f[ARGS]{_P}", "", (PARIS,)),
    Output("mistral", "A list: [1, 2] and [TOOL].", "A list: [1, 2] and [TOOL]."),
    Output(
        "mistral",
        "[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}",
        "",
        (Call("now", {}),),
        "Hm.",
        "mistral",
    ),
]
PYTHONIC = [
    Output("pythonic", "[get_weather(city='Paris')]", "", (PARIS,)),
    Output("pythonic", '[get_weather(city="Paris"), get_weather(city="Rome", days=3)]', "", (PARIS, ROME)),
    Output("pythonic", "[now()]", "", (Call("now", {}),)),
    Output(
        "pythonic",
        "[place_order(items=['a \"b\"', 'c\\'d'], address={'zip': '01', 'x': None}, price=-1.5e3, comment=(True, False))]",
        "",
        (
            Call(
                "place_order",
                {
                    "items": ['a "b"', "c'd"],
                    "address": {"zip": "01", "x": None},
                    "price": -1500.0,
                    "comment": [True, False],
                },
            ),
        ),
    ),
    Output("pythonic", "<|python_start|>[get_weather(city='Paris')]<|python_end|>", "", (PARIS,)),
    Output(
        "pythonic",
        '<|python_start|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|python_end|>',
        "",
        (PARIS,),
    ),
    Output("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list"),
    Output("pythonic", "[unknown(x=1)]", "[unknown(x=1)]"),
    Output(
        "pythonic",
        "[run_code(source='a\\n\\tb \\x41\\u00e9 \\d')]",
        "",
        (Call("run_code", {"source": "a\n\tb A\u00e9 \\d"}),),
    ),
]
QWEN_CODER = [
    Output(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "",
        (PARIS,),
    ),
    Output(
        "qwen3_coder",
        "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "Let me see.",
        (ROME, Call("now", {})),
    ),
    # Without the outer tag.
    Output(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "",
        (PARIS,),
    ),
    Output(
        "qwen3_coder",
        "<tool_call>\n<function=place_order>\n<parameter=items>\n[\"a\", 'b']\n</parameter>\n"
        "<parameter=address>\nnull\n</parameter>\n<parameter=price>\n7\n</parameter>\n"
        "<parameter=limit>\n5.0\n</parameter>\n<parameter=comment>\n12\n</parameter>\n</function>\n</tool_call>",
        "",
        (
            Call(
                "place_order",
                {"items": ["a", "b"], "address": None, "price": 7, "limit": 5, "comment": "12"},
            ),
        ),
    ),
    Output(
        "qwen3_coder",
        '<tool_call>\n<function=run_code>\n<parameter=source>\ndef f():\n    return "<a>" < 1\n\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        (Call("run_code", {"source": 'def f():\n    return "<a>" < 1\n'}),),
    ),
    Output(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n__import__('os').system('x')\n</parameter>\n"
        "<parameter=hourly>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
        "",
        (Call("get_weather", {"city": "__import__('os').system('x')", "hourly": True, "note": None}),),
    ),
    Output("qwen3_coder", "Use <function> or <func=1>.", "Use <function> or <func=1>."),
    # A closing tag is missing.
    Output(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</function>\n</tool_call>",
        "",
        (ROME,),
    ),
]
DEEPSEEK_V3 = [
    Output("deepseek_v3", f"{_BEGIN}{_v3('get_weather', _P)}{_END}", "", (PARIS,)),
    Output(
        "deepseek_v3", f"{_BEGIN}{_v3('get_weather', _P)}\n{_v3('get_weather', _R)}{_END}", "", (PARIS, ROME)
    ),
    Output(
        "deepseek_v3", f"I will check.{_BEGIN}{_v3('now', '{}')}{_END}", "I will check.", (Call("now", {}),)
    ),
    Output("deepseek_v3", f"{_v3('get_weather', _R)}", "", (ROME,)),
    Output("deepseek_v3", "Nothing to call here.", "Nothing to call here."),
    Output(
        "deepseek_v3",
        f"Thinking.</think>\n\n{_BEGIN}{_v3('get_weather', _P)}{_END}",
        "",
        (PARIS,),
        "Thinking.",
        "deepseek_r1",
        "<think>\n",
    ),
]
DEEPSEEK_V31 = [
    Output("deepseek_v31", f"{_BEGIN}{_v31('get_weather', _P)}{_END}", "", (PARIS,)),
    Output(
        "deepseek_v31", f"{_BEGIN}{_v31('get_weather', _P)}{_v31('get_weather', _R)}{_END}", "", (PARIS, ROME)
    ),
    Output("deepseek_v31", f"Wait.\n\n{_BEGIN}{_v31('now', '{}')}{_END}", "Wait.", (Call("now", {}),)),
    Output("deepseek_v31", f"{_BEGIN}{_v31('now', '{}')}", "", (Call("now", {}),)),
    Output("deepseek_v31", "a < b", "a < b"),
    # The reasoning was not closed: a call ends it.
    Output(
        "deepseek_v31",
        f"Hm.{_BEGIN}{_v31('get_weather', _P)}{_END}",
        "",
        (PARIS,),
        "Hm.",
        "deepseek_r1",
        "<think>",
    ),
]
GRANITE = [
    Output("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {_P}}}]', "", (PARIS,)),
    Output(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_P}}}, {{"name": "get_weather", "arguments": {_R}}}]',
        "",
        (PARIS, ROME),
    ),
    Output("granite", f'<tool_call>[{{"arguments": {_R}, "name": "get_weather"}}]', "", (ROME,)),
    Output("granite", f'<tool_call>{{"name": "get_weather", "arguments": {_P}}}</tool_call>', "", (PARIS,)),
    Output("granite", "It is <|sunny|>.", "It is <|sunny|>."),
    Output(
        "granite",
        'Here is my thought process:\nAsk.\n\nHere is my response:\n<|tool_call|>[{"name": "now", "arguments": {}}]',
        "",
        (Call("now", {}),),
        "Ask.",
        "granite",
    ),
]
PHI = [
    Output("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {_P}}}]', "", (PARIS,)),
    Output(
        "phi4_mini_json",
        f'functools[{{"name": "get_weather", "arguments": {_P}}}, {{"name": "get_weather", "arguments": {_R}}}]',
        "",
        (PARIS, ROME),
    ),
    Output("phi4_mini_json", 'functools [{"name": "now"}]', 'functools [{"name": "now"}]'),
    Output("phi4_mini_json", 'Ok. functools[{"name": "now", "arguments": null}]', "Ok.", (Call("now", {}),)),
    Output("phi4_mini_json", "Python has functools, which is fine.", "Python has functools, which is fine."),
    Output("phi4_mini_json", "functools[1, 2]", "functools[1, 2]"),
]
GLM = [
    Output(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "",
        (PARIS,),
    ),
    Output(
        "glm45",
        "Checking.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "Checking.",
        (ROME, Call("now", {})),
    ),
    Output(
        "glm45",
        '<tool_call>place_order\n<arg_key>items</arg_key>\n<arg_value>["x"]</arg_value>\n'
        '<arg_key>address</arg_key>\n<arg_value>{"zip": "1"}</arg_value>\n<arg_key>limit</arg_key>\n'
        "<arg_value>null</arg_value>\n</tool_call>",
        "",
        (Call("place_order", {"items": ["x"], "address": {"zip": "1"}, "limit": None}),),
    ),
    # GLM-4.7 writes it on one line.
    Output(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "",
        (PARIS,),
    ),
    Output("glm45", "<tool_call>now</tool_call>", "", (Call("now", {}),)),
    Output(
        "glm45",
        "\n<think>Two cities.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "</tool_call>",
        "",
        (PARIS,),
        "Two cities.",
        "glm45",
        "<|assistant|>",
    ),
]
KIMI = [
    Output("kimi_k2", f"{_KIMI_BEGIN}{_kimi('functions.get_weather:0', _P)}{_KIMI_END}", "", (PARIS,)),
    Output(
        "kimi_k2",
        f"{_KIMI_BEGIN}{_kimi('functions.get_weather:0', _P)}{_kimi('functions.get_weather:1', _R)}{_KIMI_END}",
        "",
        (PARIS, ROME),
    ),
    Output(
        "kimi_k2",
        f"Yes. {_KIMI_BEGIN} {_kimi('functions.now:2 ', '{}')} {_KIMI_END}",
        "Yes.",
        (Call("now", {}),),
    ),
    Output("kimi_k2", f"{_kimi('get_weather:0', _R)}", "", (ROME,)),
    Output("kimi_k2", "<|not a marker|>", "<|not a marker|>"),
    Output(
        "kimi_k2",
        f"<think>So.</think>{_KIMI_BEGIN}{_kimi('functions.now:0', '{}')}{_KIMI_END}",
        "",
        (Call("now", {}),),
        "So.",
        "kimi_k2",
    ),
]
_A = "<|start|>assistant"
_TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
HARMONY = [
    Output(
        "openai",
        f"<|channel|>analysis<|message|>Need the weather.<|end|>{_A}{_TO}{_P}<|call|>",
        "",
        (PARIS,),
        "Need the weather.",
        "gptoss",
        _A,
    ),
    Output("openai", f"{_TO}{_R}", "", (ROME,), "", "gptoss", _A),
    Output(
        "openai",
        f"<|channel|>analysis<|message|>Hm.<|end|>{_A}<|channel|>final<|message|>Hello <b>there</b>.",
        "Hello <b>there</b>.",
        (),
        "Hm.",
        "gptoss",
        _A,
    ),
    Output(
        "openai",
        f"<|channel|>commentary<|message|>I will ask.<|end|>{_A} to=functions.now<|channel|>commentary json<|message|>{{}}",
        "I will ask.",
        (Call("now", {}),),
        "",
        "gptoss",
        _A,
    ),
    Output(
        "openai",
        f"<|channel|>analysis<|message|>One.<|end|>{_A}<|channel|>analysis<|message|>Two.<|end|>"
        f"{_A}<|channel|>final<|message|>Three.<|return|>",
        "Three.",
        (),
        "One.\nTwo.",
        "gptoss",
        _A,
    ),
    Output("openai", "Just text.", "Just text.", (), "", "gptoss", _A),
    Output("openai", " goes on.", " goes on.", (), "", "gptoss", f"{_A}<|channel|>final<|message|>It"),
]
JSON = [
    Output("json", f'[{{"name": "get_weather", "parameters": {_P}}}]', "", (PARIS,)),
    Output(
        "json",
        f'[{{"name":"get_weather","parameters":{_P}}},{{"name":"now","parameters":{{}}}}]',
        "",
        (PARIS, Call("now", {})),
    ),
    Output("json", f'{{"name": "get_weather", "parameters": {_R}}}', "", (ROME,)),
    Output("json", "No.", "No."),
    Output("json", "[]", "[]"),
]
REASONING = [
    Output("", "<think>x</think>y", "y", (), "x", "deepseek_r1"),
    Output("", "x\n</think>\n\ny", "y", (), "x", "deepseek_r1", "<think>\n"),
    Output("", "x", "", (), "x", "qwen3", "<think>\n"),
    Output("", "x <think> y", "x <think> y", (), "", "qwen3"),
    Output("", "all <b>content</b>", "all <b>content</b>", (), "", "qwen3", "<think>\n\n</think>\n\n"),
    Output("", "  <thin", "  <thin", (), "", "qwen3"),
    Output("", "[THINK]x[/THINK]y", "y", (), "x", "mistral"),
    Output("", "Here's my thought process: x Here's my response: y", "y", (), "x", "granite"),
    Output("", "Here is my book.", "Here is my book.", (), "", "granite"),
    Output("", "\n<think>x</think>\ny", "y", (), "x", "glm45", "<|assistant|>"),
    Output("", "<think></think>y", "y", (), "", "glm45", "<|assistant|>"),
]

OUTPUTS = [
    *HERMES,
    *LLAMA,
    *MISTRAL,
    *PYTHONIC,
    *QWEN_CODER,
    *DEEPSEEK_V3,
    *DEEPSEEK_V31,
    *GRANITE,
    *PHI,
    *GLM,
    *KIMI,
    *HARMONY,
    *JSON,
    *REASONING,
]
