"""Answers as real models write them: calls between control tokens, reasoning, and all outputs together."""

# Texts stand as models write them, also where that is long.
# ruff: noqa: E501

from __future__ import annotations

from tests.support.family_outputs import FAMILIES
from tests.support.model_outputs import GRANITE, HERMES, LLAMA, MISTRAL, PHI, PYTHONIC, QWEN_CODER, SEED
from tests.support.parsed import PARIS, ROME, Call, Output, P, R


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL, _SEP, _CLOSE = _deepseek("tool call begin"), _deepseek("tool sep"), _deepseek("tool call end")


def _v3(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CLOSE}"


def _v31(name: str, arguments: str) -> str:
    return f"{_CALL}{name}{_SEP}{arguments}{_CLOSE}"


def _kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

DEEPSEEK_V3 = [
    Output("deepseek_v3", f"{_BEGIN}{_v3('get_weather', P)}{_END}", "", (PARIS,)),
    Output(
        "deepseek_v3", f"{_BEGIN}{_v3('get_weather', P)}\n{_v3('get_weather', R)}{_END}", "", (PARIS, ROME)
    ),
    Output(
        "deepseek_v3", f"I will check.{_BEGIN}{_v3('now', '{}')}{_END}", "I will check.", (Call("now", {}),)
    ),
    Output("deepseek_v3", f"{_v3('get_weather', R)}", "", (ROME,)),
    Output("deepseek_v3", "Nothing to call here.", "Nothing to call here."),
    Output(
        "deepseek_v3",
        f"Thinking.</think>\n\n{_BEGIN}{_v3('get_weather', P)}{_END}",
        "",
        (PARIS,),
        "Thinking.",
        "deepseek_r1",
        "<think>\n",
    ),
]

DEEPSEEK_V31 = [
    Output("deepseek_v31", f"{_BEGIN}{_v31('get_weather', P)}{_END}", "", (PARIS,)),
    Output(
        "deepseek_v31", f"{_BEGIN}{_v31('get_weather', P)}{_v31('get_weather', R)}{_END}", "", (PARIS, ROME)
    ),
    Output("deepseek_v31", f"Wait.\n\n{_BEGIN}{_v31('now', '{}')}{_END}", "Wait.", (Call("now", {}),)),
    Output("deepseek_v31", f"{_BEGIN}{_v31('now', '{}')}", "", (Call("now", {}),)),
    Output("deepseek_v31", "a < b", "a < b"),
    # The reasoning was not closed: a call ends it.
    Output(
        "deepseek_v31",
        f"Hm.{_BEGIN}{_v31('get_weather', P)}{_END}",
        "",
        (PARIS,),
        "Hm.",
        "deepseek_r1",
        "<think>",
    ),
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
    Output("kimi_k2", f"{_KIMI_BEGIN}{_kimi('functions.get_weather:0', P)}{_KIMI_END}", "", (PARIS,)),
    Output(
        "kimi_k2",
        f"{_KIMI_BEGIN}{_kimi('functions.get_weather:0', P)}{_kimi('functions.get_weather:1', R)}{_KIMI_END}",
        "",
        (PARIS, ROME),
    ),
    Output(
        "kimi_k2",
        f"Yes. {_KIMI_BEGIN} {_kimi('functions.now:2 ', '{}')} {_KIMI_END}",
        "Yes.",
        (Call("now", {}),),
    ),
    Output("kimi_k2", f"{_kimi('get_weather:0', R)}", "", (ROME,)),
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
        f"<|channel|>analysis<|message|>Need the weather.<|end|>{_A}{_TO}{P}<|call|>",
        "",
        (PARIS,),
        "Need the weather.",
        "gptoss",
        _A,
    ),
    Output("openai", f"{_TO}{R}", "", (ROME,), "", "gptoss", _A),
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
    Output("json", f'[{{"name": "get_weather", "parameters": {P}}}]', "", (PARIS,)),
    Output(
        "json",
        f'[{{"name":"get_weather","parameters":{P}}},{{"name":"now","parameters":{{}}}}]',
        "",
        (PARIS, Call("now", {})),
    ),
    Output("json", f'{{"name": "get_weather", "parameters": {R}}}', "", (ROME,)),
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
    *SEED,
    *DEEPSEEK_V3,
    *DEEPSEEK_V31,
    *GRANITE,
    *PHI,
    *GLM,
    *KIMI,
    *HARMONY,
    *FAMILIES,
    *JSON,
    *REASONING,
]
