"""Answers as smaller families of models write them: each with its own texts around calls."""

# Texts stand as models write them, also where that is long.
# ruff: noqa: E501

from __future__ import annotations

from tests.support.parsed import PARIS, ROME, Call, Output, P, R

NOW = Call("now", {})
_P, _R = f'{{"name": "get_weather", "arguments": {P}}}', f'{{"name": "get_weather", "arguments": {R}}}'
_NOW = '{"name": "now", "arguments": {}}'


def _objects(name: str, begin: str, end: str) -> list[Output]:
    """Of formats with call objects between two texts."""
    return [
        Output(name, f"{begin}{_P}{end}", "", (PARIS,)),
        Output(name, f"I will look. {begin}{_R}{end}\nDone.", "I will look.Done.", (ROME,)),
        Output(name, f'{begin}{{"name": "now"}}', "", (NOW,)),
        Output(name, f"{begin}{_P}{end}\n{begin}{_NOW}{end}", "", (PARIS, NOW)),
        Output(name, f"{begin}nothing", f"{begin}nothing"),
        Output(
            name,
            f'{begin}{{"name": "get_weather", "arguments": "{{\\"city\\": \\"Paris\\"}}"}}{end}',
            "",
            (PARIS,),
        ),
    ]


def _lists(name: str, begin: str, end: str) -> list[Output]:
    """Of formats with an array of call objects between two texts."""
    return [
        *_objects(name, begin, end),
        Output(name, f"{begin}[{_P}, {_R}]{end}", "", (PARIS, ROME)),
        Output(name, f'{begin}[{{"name": "now", "arguments": {{}}, "id": "x1"}}]{end}', "", (NOW,)),
        Output(name, f"{begin}[{_P}, {_NOW[:9]}", "", (PARIS,)),
        Output(name, f"{begin}[]{end}", f"{begin}[]{end}"),
    ]


APRIEL = [
    *_lists("apriel", "<tool_calls>", "</tool_calls>"),
    Output(
        "apriel",
        f"Ask for it.\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{_P}]</tool_calls>\n[END FINAL RESPONSE]",
        "",
        (PARIS,),
        "Ask for it.",
        "apriel",
        "<|begin_assistant|>\nHere are my reasoning steps:\n",
    ),
    Output(
        "",
        "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n42 [END] it is.\n[END FINAL RESPONSE]\n",
        "42 [END] it is.",
        (),
        "Hm.",
        "apriel",
        "<|assistant|>\n",
    ),
]
MINIMAX = [
    *_objects("minimax", "<tool_calls>\n", "\n</tool_calls>"),
    Output("minimax", f"<tool_calls>\n{_P}\n{_R}\n</tool_calls>", "", (PARIS, ROME)),
    Output(
        "minimax",
        f"<think>\nHm.\n</think>\n\n<tool_calls>\n{_P}\n</tool_calls>",
        "",
        (PARIS,),
        "Hm.",
        "minimax_m2",
    ),
]
NEMOTRON = [
    *_lists("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
    Output(
        "nemotron_json",
        f"Hm.\n</think>\n\n<TOOLCALL>[{_P}]</TOOLCALL>\n",
        "",
        (PARIS,),
        "Hm.",
        "nemotron_v3",
        "<think>\n",
    ),
]
LONGCAT = _lists("longcat", "<longcat_tool_call>", "</longcat_tool_call>")

_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM = [
    Output("lfm2", f"{_LFM}[get_weather(city='Paris')]{_LFM_END}", "", (PARIS,)),
    Output(
        "lfm2",
        f'{_LFM} [get_weather(city="Rome", days=3), now()]{_LFM_END}\nChecking.',
        "Checking.",
        (ROME, NOW),
    ),
    Output("lfm2", f"{_LFM}[{_P}, {_R}]{_LFM_END}", "", (PARIS, ROME)),
    Output(
        "lfm2",
        f"{_LFM}[run_code(source='grep -F \"]\" a\ncat \\'b\\' \x00\u00e9')]{_LFM_END}",
        "",
        (Call("run_code", {"source": "grep -F \"]\" a\ncat 'b' \x00\u00e9"}),),
    ),
    Output(
        "lfm2",
        f"{_LFM}[place_order(items=[], address={{'zip': '01'}}, limit=None, comment=[True, -1.5])]{_LFM_END}",
        "",
        (
            Call(
                "place_order", {"items": [], "address": {"zip": "01"}, "limit": None, "comment": [True, -1.5]}
            ),
        ),
    ),
    Output("lfm2", f"{_LFM}[]{_LFM_END}", f"{_LFM}[]{_LFM_END}"),
    Output("lfm2", f"{_LFM}[now(), bad(x=b'z')]{_LFM_END}", f", bad(x=b'z')]{_LFM_END}", (NOW,)),
    Output("lfm2", f"So.{_LFM}[get_weat", f"So.{_LFM}[get_weat"),
    Output(
        "lfm2",
        f"<think>Hm.</think>{_LFM}[now()]{_LFM_END}",
        "",
        (NOW,),
        "Hm.",
        "deepseek_r1",
    ),
]
OLMO = [
    Output("olmo3", "<function_calls>get_weather(city='Paris')</function_calls>", "", (PARIS,)),
    Output(
        "olmo3",
        'Ok.\n<function_calls>\nget_weather(city="Rome", days=3)\nnow()\n</function_calls>\n',
        "Ok.",
        (ROME, NOW),
    ),
    Output(
        "olmo3",
        '<function_calls>place_order(items=["a)"], limit=null, comment=true)</function_calls>',
        "",
        (Call("place_order", {"items": ["a)"], "limit": None, "comment": True}),),
    ),
    Output("olmo3", "<function_calls>now()", "", (NOW,)),
    Output("olmo3", "<function_calls></function_calls>", "<function_calls></function_calls>"),
    Output("olmo3", "<function_calls>now()\nnow(1)</function_calls>", "\nnow(1)</function_calls>", (NOW,)),
    Output(
        "olmo3",
        "<think>Hm.</think>\n\n<function_calls>now()</function_calls>",
        "",
        (NOW,),
        "Hm.",
        "olmo3",
    ),
]

_M2, _M2_END = "<minimax:tool_call>\n", "</minimax:tool_call>"


_XML = '<a b="c">&amp; </parameter> x</invoke> y\n<z/>'


def _invoke(name: str, **values: str) -> str:
    given = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="{name}">\n{given}</invoke>\n'


MINIMAX_M2 = [
    Output("minimax_m2", f"{_M2}{_invoke('get_weather', city='Paris')}{_M2_END}", "", (PARIS,)),
    Output(
        "minimax_m2",
        f"Let me check.\n{_M2}{_invoke('get_weather', city='Rome', days='3')}{_invoke('now')}{_M2_END}\nWait.",
        "Let me check.Wait.",
        (ROME, NOW),
    ),
    Output(
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>'
        '<invoke name="now"></invoke></minimax:tool_call>',
        "",
        (PARIS, NOW),
    ),
    Output(
        "minimax_m2",
        _M2 + _invoke("run_code", source=_XML) + _M2_END,
        "",
        (Call("run_code", {"source": _XML}),),
    ),
    Output(
        "minimax_m2",
        _M2 + _invoke("place_order", items='["x"]', price="1.5", limit="null", comment="[1") + _M2_END,
        "",
        (Call("place_order", {"items": ["x"], "price": 1.5, "limit": None, "comment": "[1"}),),
    ),
    Output("minimax_m2", f"{_M2}{_invoke('now')}<invo", "", (NOW,)),
    Output("minimax_m2", f"{_M2}call it{_M2_END}", f"{_M2}call it{_M2_END}"),
    Output("minimax_m2", 'Write <invoke name="f">.', 'Write <invoke name="f">.'),
    Output(
        "minimax_m2",
        f"Hm.\n</think>\n\n{_M2}{_invoke('now')}{_M2_END}",
        "",
        (NOW,),
        "Hm.",
        "minimax_m2",
        "<think>\n",
    ),
]


def _hy(name: str, **values: str) -> str:
    given = "".join(
        f"<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n"
        for key, value in values.items()
    )
    return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{given}</tool_call:opensource>\n"


_HY, _HY_END = "<tool_calls:opensource>\n", "</tool_calls:opensource>"
HY = [
    Output("hy_v3", f"{_HY}{_hy('get_weather', city='Paris')}{_HY_END}", "", (PARIS,)),
    Output(
        "hy_v3",
        f"Ok.\n{_HY}{_hy('get_weather', city='Rome', days='3')}{_hy('now')}{_HY_END}",
        "Ok.",
        (ROME, NOW),
    ),
    Output("hy_v3", _hy("now"), "", (NOW,)),
    Output("hy_v3", "<tool_call:opensource>now</tool_call:opensource>", "", (NOW,)),
    Output("hy_v3", "a <tool_call> b", "a <tool_call> b"),
    Output(
        "hy_v3",
        f"Hm.</think:opensource>{_HY}{_hy('now')}{_HY_END}",
        "",
        (NOW,),
        "Hm.",
        "hy_v3",
        "<think:opensource>",
    ),
]
GIGACHAT = [
    *_objects("gigachat3", "<|function_call|>", "<|message_sep|>\n\n"),
    Output("gigachat3", f"Now.<|message_sep|>\n\nfunction call<|role_sep|>\n{_P}", "Now.", (PARIS,)),
    Output("gigachat3", f"function call<|role_sep|>\n{_NOW}<|message_sep|>", "", (NOW,)),
    Output("gigachat3", "A function call is meant.", "A function call is meant."),
]
INTERNLM = [
    Output(
        "internlm",
        f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {P}}}<|action_end|>',
        "",
        (PARIS,),
    ),
    Output("internlm", f"Ok.<|action_start|><|plugin|>{_R}<|action_end|>\n", "Ok.", (ROME,)),
    Output("internlm", '<|action_start|><|plugin|>{"name": "now"}', "", (NOW,)),
    Output("internlm", "<|action_start|><|interpreter|>\nx", "<|action_start|><|interpreter|>\nx"),
    Output("internlm", "An action.", "An action."),
]


def _action(text: str, number: int = 0) -> str:
    return f'{{"tool_call_id": "{number}", "tool_name": {text}}}'


_C, _C_END = "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"
_C_PARIS = _action(f'"get_weather", "parameters": {P}')
COHERE = [
    Output("cohere_command3", f"{_C}{_C_PARIS}{_C_END}", "", (PARIS,)),
    Output(
        "cohere_command3",
        _C
        + _action(f'"get_weather", "parameters": {R}')
        + ",\n    "
        + _action('"now", "parameters": {}', 1)
        + _C_END,
        "",
        (ROME, NOW),
    ),
    Output("cohere_command3", _C + _action('"now"') + _C_END, "", (NOW,)),
    Output("cohere_command3", "<|START_RESPONSE|>It is 3.<|END_RESPONSE|>", "It is 3."),
    Output("cohere_command3", f"{_C}{_P}{_C_END}", f"{_C}{_P}{_C_END}"),
    Output(
        "cohere_command3",
        f"Hm.<|END_THINKING|>{_C}{_C_PARIS}{_C_END}",
        "",
        (PARIS,),
        "Hm.",
        "cohere_command3",
        "<|START_THINKING|>",
    ),
    Output(
        "cohere_command3",
        "<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Yes.",
        (),
        "",
        "cohere_command3",
        "<|START_THINKING|><|END_THINKING|>",
    ),
]
FUNCTIONARY = [
    Output("functionary_v31", f"<function=get_weather>{P}</function>", "", (PARIS,)),
    Output(
        "functionary_v31",
        f"Ok.\n<function=get_weather>{R}</function>\n<function=now>{{}}</function>",
        "Ok.",
        (ROME, NOW),
    ),
    Output("functionary_v31", "<function=now></function>", "", (NOW,)),
    Output("functionary_v31", f"<function=get_weather>{P}", "", (PARIS,)),
    Output("functionary_v31", "<function=now>text</function>", "<function=now>text</function>"),
]
XLAM = [
    Output("xlam", f"[{_P}, {_R}]", "", (PARIS, ROME)),
    Output("xlam", f"```json\n[{_P}]\n```", "", (PARIS,)),
    Output("xlam", f"<tool_call>[{_P}]</tool_call>", "", (PARIS,)),
    Output("xlam", f"[TOOL_CALLS][{_R}]", "", (ROME,)),
    Output("xlam", '[{"name": "unknown", "arguments": {}}]', '[{"name": "unknown", "arguments": {}}]'),
    Output("xlam", "```json\n[1]\n```", "```json\n[1]\n```"),
    Output("xlam", f"<think>Hm.</think>[{_P}]", "", (PARIS,), "Hm.", "qwen3"),
]
FAMILIES = [
    *APRIEL,
    *MINIMAX,
    *NEMOTRON,
    *LONGCAT,
    *LFM,
    *OLMO,
    *MINIMAX_M2,
    *HY,
    *GIGACHAT,
    *INTERNLM,
    *COHERE,
    *FUNCTIONARY,
    *XLAM,
]
