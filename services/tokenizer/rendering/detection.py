"""Which parsers a model's answers need, told by what its chat template writes.

A template shows the model's own calls and thoughts when it renders an assistant's earlier turns. A parser is
chosen where the probes' call stands in such a turn as the parser would read it; a marker somewhere in the
template's source says nothing, since families share markers around different formats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from catenary.parsers import NO_PARSER
from services.tokenizer.rendering.probes import CALL_ID, KEY, NAME, THOUGHTS, VALUE, Written


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names from catenary/parsers.py; empty: none."""

    tool: str = ""
    reasoning: str = ""
    response_template: str = ""
    """JSON that describes them better than the names, unless an operator named any."""

    def chosen(self, tool: str | None, reasoning: str | None) -> Parsers:
        """The same with what an operator says instead: a name, or `none`."""
        return Parsers(
            _named(tool, self.tool),
            _named(reasoning, self.reasoning),
            self.response_template if tool is None and reasoning is None else "",
        )


def _named(name: str | None, found: str) -> str:
    return found if name is None else "" if name == NO_PARSER else name


@dataclass(frozen=True, slots=True)
class _Sign:
    """A parser, and what it reads."""

    parser: str
    pattern: re.Pattern[str]

    def found(self, text: str) -> bool:
        """Whether it stands in `text`."""
        return self.pattern.search(text) is not None


_ARGUMENTS = r'\{ "@key" : "@value" \}'
# Further fields of a call, such as its id.
_REST = r'(?: , "\w+" : "[^"]*")*'
_OBJECT = rf'\{{ (?:"\w+" : "[^"]*" , )*"name" : "@name" , "(?:arguments|parameters)" : @args{_REST} \}}'
_ARGUMENTS_FIRST = r'\{ "(?:arguments|parameters)" : @args , "name" : "@name" \}'
# Those of the probes, by the words that stand for them in a pattern; a blank is any white space.
_WORDS = {
    "@call": f"(?:{_OBJECT}|{_ARGUMENTS_FIRST})",
    "@args": _ARGUMENTS,
    " ": r"\s*",
    "@name": NAME,
    "@key": KEY,
    "@value": re.escape(VALUE),
    "@id": CALL_ID,
    "@thoughts": re.escape(THOUGHTS),
}


def _sign(parser: str, pattern: str) -> _Sign:
    for word, meaning in _WORDS.items():
        pattern = pattern.replace(word, meaning)
    return _Sign(parser, re.compile(pattern, re.DOTALL))


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _SEPARATOR, _END = map(_deepseek, ("tool call begin", "tool sep", "tool call end"))
_KIMI_ID = r"(?:functions\.)?(?:@name(?::\d+)?|@id)"
_PYTHON = r"@name\( @key = [\"']@value[\"'] \)"
_PYTHON_CALL = rf"\[ {_PYTHON} \]"
_COHERE_CALL = r'\{ (?:"\w+" : "[^"]*" , )*"tool_name" : "@name" , "parameters" : @args \}'


def _suffixed(name: str) -> str:
    return name + ":opensource"


_HY_CALL, _HY_SEPARATOR, _HY_KEY, _HY_VALUE = map(
    _suffixed, ("tool_call", "tool_sep", "arg_key", "arg_value")
)

# In a turn with the call.
_CALLS = (
    _sign(
        "kimi_k2",
        rf"<\|tool_call_begin\|> {_KIMI_ID} <\|tool_call_argument_begin\|> @args <\|tool_call_end\|>",
    ),
    _sign("openai", r"to=functions\.@name <\|channel\|>commentary[^{]*<\|message\|> @args"),
    _sign("openai", r"<\|channel\|>commentary to=functions\.@name[^{]*<\|message\|> @args"),
    _sign("deepseek_v3", rf"{_BEGIN}function{_SEPARATOR} @name ```json @args ``` {_END}"),
    _sign("deepseek_v31", rf"{_BEGIN} @name {_SEPARATOR} @args {_END}"),
    _sign("mistral", r"\[TOOL_CALLS\] \[ @call \]"),
    _sign("mistral", r"\[TOOL_CALLS\] @call"),
    _sign("mistral", r"\[TOOL_CALLS\] @name(?:\[CALL_ID\]\w*)?(?:\[ARGS\])? @args"),
    _sign(
        "qwen3_coder",
        "<tool_call> <function=@name> <parameter=@key> @value </parameter> </function> </tool_call>",
    ),
    _sign(
        "seed_oss",
        "<seed:tool_call> <function=@name> <parameter=@key>@value</parameter> </function> </seed:tool_call>",
    ),
    _sign("glm45", "<tool_call> @name <arg_key>@key</arg_key> <arg_value>@value</arg_value> </tool_call>"),
    _sign("granite", r"<\|tool_call\|> (?:\[ @call \]|@call)"),
    _sign("phi4_mini_json", r"functools \[ @call \]"),
    _sign("pythonic", rf"<\|python_start\|> {_PYTHON_CALL}"),
    # Llama 4's own template closes the marker before the call.
    _sign("pythonic", r"<\|python_start\|>(?:<\|python_end\|>)? @call"),
    _sign("lfm2", rf"<\|tool_call_start\|> (?:{_PYTHON_CALL}|\[ @call \]) <\|tool_call_end\|>"),
    _sign("olmo3", f"<function_calls> {_PYTHON} </function_calls>"),
    _sign("nemotron_json", r"<TOOLCALL> \[ @call \] </TOOLCALL>"),
    _sign("apriel", r"<tool_calls> \[ @call \] </tool_calls>"),
    _sign("minimax", "<tool_calls> @call </tool_calls>"),
    _sign(
        "minimax_m2",
        '<minimax:tool_call> <invoke name="@name"> <parameter name="@key">@value</parameter> </invoke> '
        "</minimax:tool_call>",
    ),
    _sign(
        "hy_v3",
        f"<{_HY_CALL}> @name <{_HY_SEPARATOR}> <{_HY_KEY}>@key</{_HY_KEY}> <{_HY_VALUE}>@value</{_HY_VALUE}> "
        f"</{_HY_CALL}>",
    ),
    _sign("gigachat3", r"(?:<\|function_call\|>|function call<\|role_sep\|>) @call"),
    _sign("internlm", r"<\|action_start\|> <\|plugin\|> @call <\|action_end\|>"),
    _sign("cohere_command3", rf"<\|START_ACTION\|> \[ {_COHERE_CALL} \] <\|END_ACTION\|>"),
    _sign("longcat", "<longcat_tool_call> @call </longcat_tool_call>"),
    _sign("functionary_v31", "<function=@name> @args </function>"),
    _sign("llama3_json", r"<\|python_tag\|> @call"),
    _sign("hermes", "<tool_call> @call </tool_call>"),
)
# At the beginning of an answer: without a marker, a call is read nowhere else.
_BARE = (
    _sign("pythonic", rf"^{_PYTHON_CALL}"),
    _sign("xlam", r"^\[ @call \]"),
    _sign("llama3_json", "^@call"),
)
# In the words with which a template tells the model of a format: Meta's, whose history has calls as JSON, and
# those of templates that never show a call.
_PYTHONIC = _sign("pythonic", r"\[func_name1\(params_name1=")
_TOLD = (
    _PYTHONIC,
    _sign("granite", r"<\|tool_call\|>[^.<]* JSON list"),
    _sign("phi4_mini_json", r'functools\[ \{ "name"'),
    _sign(
        "hermes",
        '<tool_call> { "name":[^<>]*(?:<[^<>]*>)?[^<>]*"arguments":[^<]*(?:<args[^<]*)?} </tool_call>',
    ),
)
_THOUGHTS = (
    _sign("gptoss", r"<\|channel\|>analysis<\|message\|> @thoughts"),
    _sign("mistral", r"\[THINK\] @thoughts \[/THINK\]"),
    _sign("seed_oss", "<seed:think> @thoughts </seed:think>"),
    _sign("hy_v3", "<think:opensource> @thoughts </think:opensource>"),
    _sign("cohere_command3", r"<\|START_THINKING\|> @thoughts <\|END_THINKING\|>"),
    _sign("apriel", r"@thoughts \[BEGIN FINAL RESPONSE\]"),
)
_TOLD_THOUGHTS = (
    _sign("seed_oss", "<seed:think> $"),
    _sign("mistral", r"\[THINK\].*\[/THINK\]"),
    _sign("granite", "Here is my thought process:"),
    _sign("apriel", r"\[BEGIN FINAL RESPONSE\]"),
)
# Between the same tags under several names.
_TAGGED = _sign("deepseek_r1", "<think> (?:@thoughts)? </think>")
_OPENS = _sign("deepseek_r1", "<think>.*</think>|(?:<think>|</think>) $")
_KIMI_TURN = "<|im_middle|>"


def detect_parsers(templates: Sequence[tuple[Written, frozenset[str]]]) -> Parsers:
    """The parsers for a model with these templates: what each writes, and the variables that it reads.

    Of calls the first one says, of thoughts all."""
    if not templates:
        return Parsers()
    tool = _tool(templates[0][0])
    found = (_reasoning(shown, variables, tool) for shown, variables in templates)
    return Parsers(tool, next(filter(None, found), ""))


def _tool(shown: Written) -> str:
    told = next((sign.parser for sign in _TOLD if any(map(sign.found, shown.prompts))), "")
    if not shown.call:
        return told
    calls = (sign.parser for sign in _CALLS if sign.found(shown.call))
    bare = (sign.parser for sign in _BARE if sign.found(shown.call_begins))
    call = next(calls, "") or next(bare, "")
    # Its calls may be JSON in the history all the same, which the parser reads too.
    return _PYTHONIC.parser if call == "llama3_json" and told == _PYTHONIC.parser else call


def _reasoning(shown: Written, variables: frozenset[str], tool: str) -> str:
    for signs, texts in ((_THOUGHTS, shown.thoughts), (_TOLD_THOUGHTS, shown.prompts)):
        for sign in signs:
            if any(map(sign.found, texts)):
                return sign.parser
    tagged = any(map(_TAGGED.found, shown.thoughts)) or any(map(_OPENS.found, shown.prompts))
    if not tagged and not shown.cuts_thoughts:
        return ""
    # One format, whose names vLLM's users know by the model.
    if tool == "glm45":
        return "glm45"
    if any(_KIMI_TURN in prompt for prompt in shown.prompts):
        return "kimi_k2"
    return "qwen3" if "enable_thinking" in variables else "deepseek_r1"
