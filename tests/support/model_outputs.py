"""Answers as real models write them: calls as JSON, Python and XML."""

# Texts stand as models write them, also where that is long.
# ruff: noqa: E501

from __future__ import annotations

from tests.support.parsed import PARIS, ROME, Call, Output, P, R

HERMES = [
    Output("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {P}}}\n</tool_call>', "", (PARIS,)),
    Output(
        "hermes",
        f'I will look.\n<tool_call>\n{{"name": "get_weather", "arguments": {P}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {R}}}\n</tool_call>',
        "I will look.",
        (PARIS, ROME),
    ),
    # Arguments before the name (vLLM 9693), and arguments as text.
    Output("hermes", f'<tool_call>{{"arguments": {R}, "name": "get_weather"}}</tool_call>', "", (ROME,)),
    Output(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n</tool_call>',
        "",
        (PARIS,),
    ),
    # No closing tag at the end, and none between two calls.
    Output("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {P}}}\n', "", (PARIS,)),
    Output(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {P}}}'
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
        f'<think>\nParis, I guess.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {P}}}\n</tool_call>',
        "",
        (PARIS,),
        "Paris, I guess.",
        "qwen3",
    ),
]

LLAMA = [
    Output("llama3_json", f'{{"name": "get_weather", "parameters": {P}}}', "", (PARIS,)),
    Output(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {P}}}; {{"name": "get_weather", "parameters": {R}}}',
        "",
        (PARIS, ROME),
    ),
    Output("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {P}}}', "", (PARIS,)),
    Output(
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "parameters": {R}}}',
        "",
        (ROME,),
    ),
    Output("llama3_json", '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}'),
    Output("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Output("llama3_json", "The weather is {fine}.", "The weather is {fine}."),
    Output("llama3_json", f'\n{{"name": "get_weather", "arguments": {P}}}\n', "", (PARIS,)),
]

MISTRAL = [
    Output("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {P}}}]', "", (PARIS,)),
    Output(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {P}, "id": "a1b2c3d4e"}}, '
        f'{{"name": "get_weather", "arguments": {R}}}]',
        "",
        (PARIS, ROME),
    ),
    Output("mistral", f"[TOOL_CALLS]get_weather{P}", "", (PARIS,)),
    Output("mistral", f"[TOOL_CALLS]get_weather{P}[TOOL_CALLS]get_weather{R}", "", (PARIS, ROME)),
    Output("mistral", f"Sure. [TOOL_CALLS]get_weather[ARGS]{R}", "Sure.", (ROME,)),
    Output("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]XkX0aVJ2f[ARGS]{P}", "", (PARIS,)),
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

SEED = [
    Output(
        "seed_oss",
        "<seed:think>\nhm\n</seed:think>\nLet me see.\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Rome</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "Let me see.",
        (ROME,),
        "hm",
        "seed_oss",
    ),
    Output(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>"
        "<seed:tool_call><function=now></function></seed:tool_call>",
        "",
        (PARIS, Call("now", {})),
    ),
    Output(
        "seed_oss",
        '<seed:tool_call>\n<function=place_order>\n<parameter=items>["a"]</parameter>\n'
        "<parameter=price>7</parameter>\n<parameter=comment>a\nb</parameter>\n</function>\n</seed:tool_call>",
        "",
        (Call("place_order", {"items": ["a"], "price": 7, "comment": "a\nb"}),),
    ),
    # The thoughts are left open.
    Output(
        "seed_oss",
        "hm\n<seed:tool_call><function=now></function></seed:tool_call>",
        "",
        (Call("now", {}),),
        "hm",
        "seed_oss",
        "<seed:think>",
    ),
    Output("seed_oss", "Use <tool_call> or <function=f>.", "Use <tool_call> or <function=f>."),
]

GRANITE = [
    Output("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {P}}}]', "", (PARIS,)),
    Output(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {P}}}, {{"name": "get_weather", "arguments": {R}}}]',
        "",
        (PARIS, ROME),
    ),
    Output("granite", f'<tool_call>[{{"arguments": {R}, "name": "get_weather"}}]', "", (ROME,)),
    Output("granite", f'<tool_call>{{"name": "get_weather", "arguments": {P}}}</tool_call>', "", (PARIS,)),
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
    Output("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {P}}}]', "", (PARIS,)),
    Output(
        "phi4_mini_json",
        f'functools[{{"name": "get_weather", "arguments": {P}}}, {{"name": "get_weather", "arguments": {R}}}]',
        "",
        (PARIS, ROME),
    ),
    Output("phi4_mini_json", 'functools [{"name": "now"}]', 'functools [{"name": "now"}]'),
    Output("phi4_mini_json", 'Ok. functools[{"name": "now", "arguments": null}]', "Ok.", (Call("now", {}),)),
    Output("phi4_mini_json", "Python has functools, which is fine.", "Python has functools, which is fine."),
    Output("phi4_mini_json", "functools[1, 2]", "functools[1, 2]"),
]
