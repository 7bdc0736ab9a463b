"""What a template is given besides contents: tools, calls, results, thoughts, documents, variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.rendering import (
    ChatOptions,
    ChatTurn,
    JsonLimits,
    ModelFiles,
    ModelFilesError,
    PromptLimits,
    RefusalCode,
    Renderer,
    RenderRefused,
    TurnCall,
    read_model_files,
)
from tests.support import chat_templates
from tests.support import tiny_tokenizer as tiny
from tests.support.steps import counted

CONTROL_IDS = set(range(len(tiny.ADDED_TOKENS)))
HI = [ChatTurn("user", "Hi")]
SHOW = (
    "{{ tools | tojson }}{{ documents | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    "{{ x | default('-') | tojson }}{{ bos_token }}"
)


def renderer_of(template: str = SHOW, named: dict[str, str] | None = None, **options: Any) -> Renderer:
    document = json.dumps(tiny.tokenizer_json()).encode()
    files = ModelFiles(document, template, {"bos_token": "<|im_start|>"}, None, named or {})
    return Renderer(files, max_rendered_chars=10_000_000, **options)


HERMES, GRANITE, QWEN = (
    renderer_of(template) for template in (chat_templates.HERMES, chat_templates.GRANITE, chat_templates.QWEN)
)
SHOWING = renderer_of()


def text(renderer: Renderer, turns: list[ChatTurn], options: ChatOptions | None = None) -> str:
    ids = renderer.chat(turns, options or ChatOptions()).ids
    return renderer.detokenize(ids, skip_special_tokens=False)


def refused(renderer: Renderer, turns: list[ChatTurn], options: ChatOptions) -> RenderRefused:
    with pytest.raises(RenderRefused) as caught:
        renderer.chat(turns, options)
    return caught.value


def everywhere(said: str) -> tuple[list[ChatTurn], ChatOptions]:
    """A chat that says the same wherever a caller can say something."""
    calls = (TurnCall(said or "id", said or "f", json.dumps({said: [said, {"k": said}]})),)
    turns = [
        ChatTurn("system", said),
        ChatTurn("user", said, said),
        ChatTurn("assistant", said, tool_calls=calls, reasoning=said),
        ChatTurn("tool", said, said, tool_call_id=said),
        ChatTurn("assistant", said, reasoning=said),
    ]
    function = {"name": said, "description": said, "parameters": {said: {"enum": [said, [said]]}}}
    data = json.dumps([{"type": "function", "function": function, said: said}])
    documents = json.dumps([{"title": said, "text": said, said: said}])
    return turns, ChatOptions(tools=data, documents=documents)


@pytest.mark.parametrize("renderer", [SHOWING, GRANITE])
@pytest.mark.parametrize("variables", ["", '{"x": ["%s", {"%s": "%s"}]}'])
@given(
    said=st.lists(
        st.one_of(
            st.sampled_from([*tiny.ADDED_TOKENS, "<|im_", "end|>", "<", "|>", " "]), st.text(max_size=4)
        )
    ).map("".join)
)
@settings(max_examples=40, deadline=None)
@pytest.mark.advisory("CVE-2026-44222")
def test_callers_write_no_control_token_anywhere(renderer: Renderer, variables: str, said: str) -> None:
    turns, options = everywhere(said)
    if variables and renderer is SHOWING:
        inner = json.dumps(said)[1:-1]
        options = ChatOptions(
            tools=options.tools, documents=options.documents, variables=variables.replace("%s", inner)
        )
    quiet, _ = everywhere("x")
    ids = renderer.chat(turns, options).ids
    expected = renderer.chat(quiet, options=ChatOptions(tools="[{}]", documents='[{"text": "x"}]')).ids
    assert [i for i in ids if i in CONTROL_IDS] == [i for i in expected if i in CONTROL_IDS]


def test_escapes_in_json_do_not_hide_a_spelling() -> None:
    call = TurnCall("c", "f", '{"a": "\\u003c|im_end|>"}')
    options = ChatOptions(tools='[{"d": "\\u003c|im_end|\\u003e"}]', variables='{"x": "\\u003c|im_end|>"}')
    ids = SHOWING.chat([ChatTurn("assistant", None, tool_calls=(call,))], options).ids
    assert tiny.IM_END_ID not in ids
    assert SHOWING.detokenize(ids, skip_special_tokens=False).count("<|im_end|>") == 3


def test_calls_and_results_as_templates_know_them() -> None:
    turns = [
        ChatTurn("user", "2+2?"),
        ChatTurn("assistant", None, tool_calls=(TurnCall("c1", "add", '{"a": 2.0, "é": ["x"]}'),)),
        ChatTurn("tool", "4", tool_call_id="c1"),
    ]
    shown = text(HERMES, turns, ChatOptions(tools='[{"type": "function", "function": {"name": "add"}}]'))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2.0, "é": ["x"]}}\n</tool_call>' in shown
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in shown
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>" in shown


def test_a_call_needs_no_content_even_where_the_template_reads_it() -> None:
    call = ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", "{}"),))
    assert "<|im_start|>assistant\n<|im_end|>" in text(renderer_of(tiny.CHATML_TEMPLATE), [*HI, call])


def test_thoughts_have_the_names_that_templates_read() -> None:
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}|{{ messages[0].content }}"
    assert text(renderer_of(template), [ChatTurn("assistant", "a", reasoning="hm")]) == "hm|hm|a"


@pytest.mark.parametrize(
    "arguments", ["", " \n", "null", "{}", '{"a": 1}', ' {"a": 1}\n', '{"a": 1, "a": 2}']
)
def test_good_arguments(arguments: str) -> None:
    turn = ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", arguments),))
    assert json.dumps(json.loads(arguments.strip() or "{}") or {}) in text(SHOWING, [turn])


# As models write them: cut, Python, two objects, numbers and characters that JSON has not.
NO_OBJECTS = [
    '{"x": "a',
    "[]",
    '"str"',
    "1",
    "{",
    "{'x': 1}",
    '{"x": NaN}',
    '{"x": 1}{"y": 2}',
    "plain words",
]
NO_OBJECTS += ['{"x": "\\ud800"}', '{"x": 1e999}', '{"a":' * 70 + "1", "[1,", "tru", '{"x": "a\n\n\n']
WALKS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}</{{ key }}>{% endfor %}"
    "{% endfor %}{{ m.content }}{% endfor %}"
)

CUT_RENDERERS = {
    template: renderer_of(template)
    for template in (WALKS, chat_templates.DEEPSEEK, chat_templates.QWEN, chat_templates.GRANITE)
}


def calls_with(arguments: str) -> ChatTurn:
    return ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", arguments),))


@pytest.mark.parametrize("arguments", NO_OBJECTS)
def test_arguments_of_a_cut_call_are_taken_as_they_are(arguments: str) -> None:
    """A conversation goes on behind them: OpenAI takes any text, and our own answers may hold it."""
    turns = [
        *HI,
        ChatTurn("assistant", None, tool_calls=(TurnCall("c", "cut", arguments), TurnCall("d", "f", "{}"))),
        ChatTurn("tool", "error: no JSON", tool_call_id="c"),
    ]
    # Where text is wanted, it is that; where JSON is written, a string of it; else one value of an object.
    assert f"cut\n```json\n{arguments}\n```" in text(renderer_of(chat_templates.DEEPSEEK), turns)
    assert '{"name": "cut", "arguments": ' + arguments + "}\n</tool_call>" in text(QWEN, turns)
    assert '"arguments": ' + json.dumps(arguments) + "}" in text(HERMES, turns)
    walked = text(renderer_of(WALKS), turns)
    assert f"cut<invalid_arguments>{arguments}</invalid_arguments>f" in walked


@pytest.mark.parametrize("template", [SHOW, WALKS, chat_templates.DEEPSEEK])
@pytest.mark.parametrize(
    "arguments", ['{"a":' * 65 + "1" + "}" * 65, "[" * 100_000, '{"a": [' + "1," * 300 + "1]}"]
)
def test_arguments_beyond_the_limits_are_named(template: str, arguments: str) -> None:
    calls = (TurnCall("c", "f", "{}"), TurnCall("d", "f", arguments))
    limited = renderer_of(template, json_limits=JsonLimits(max_depth=64, max_values=300))
    error = refused(limited, [*HI, ChatTurn("assistant", None, tool_calls=calls)], ChatOptions())
    assert error.param == "messages.1.tool_calls.1.function.arguments"
    assert "64 levels" in error.message or "300 values" in error.message


@pytest.mark.parametrize("arguments", ['{"x": "<|im_end|>', '{"x": "\\u003c|im_end|>', '["<|im_end|>"]'])
@pytest.mark.parametrize("template", [SHOW, WALKS, chat_templates.DEEPSEEK, chat_templates.QWEN])
def test_cut_arguments_write_no_control_token(template: str, arguments: str) -> None:
    renderer = renderer_of(template)
    turns = [*HI, ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", "{}"),))]
    cut = [*HI, ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", arguments),))]
    shown = [[i for i in renderer.chat(each, ChatOptions()).ids if i in CONTROL_IDS] for each in (turns, cut)]
    assert shown[0] == shown[1]


@given(
    said=st.lists(
        st.one_of(
            st.sampled_from([*tiny.ADDED_TOKENS, '{"x": ', "}", '"', "\\u003c", "|im_end|>"]),
            st.text(max_size=4),
        )
    ).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_any_text_is_taken_for_arguments_and_writes_no_control_token(said: str) -> None:
    for renderer in CUT_RENDERERS.values():
        shown = [
            [i for i in renderer.chat([*HI, calls_with(arguments)], ChatOptions()).ids if i in CONTROL_IDS]
            for arguments in ("{}", said)
        ]
        assert shown[0] == shown[1]


def test_a_call_is_shown_by_templates_that_ask_whether_content_is_none() -> None:
    """DeepSeek's: a message with an empty content, or without any, is an answer and no call."""
    call = ChatTurn("assistant", None, tool_calls=(TurnCall("c", "weather", '{"city": "Ulm"}'),))
    shown = text(renderer_of(chat_templates.CONTENT_IS_NONE), [*HI, call, ChatTurn("tool", "sunny")])
    assert 'weather\n```json\n{"city": "Ulm"}\n```' in shown
    assert "None" not in shown


def calls_of(*names: str, content: str | None = None, reasoning: str | None = None) -> ChatTurn:
    calls = tuple(TurnCall(name, name, f'{{"of": "{name}"}}') for name in names)
    return ChatTurn("assistant", content, tool_calls=calls, reasoning=reasoning)


def results_of(*names: str) -> list[ChatTurn]:
    return [ChatTurn("tool", f"result of {name}", tool_call_id=name) for name in names]


def test_text_beside_a_call_does_not_hide_it() -> None:
    """Templates that ask whether content is none show text or calls: both are told, one after the other."""
    renderer = renderer_of(chat_templates.CONTENT_IS_NONE)
    shown = text(renderer, [*HI, calls_of("f", content="Let me see."), *results_of("f")])
    assert "<|Assistant|>Let me see.<|im_end|><|Assistant|><tool_call>f" in shown
    assert shown.index('{"of": "f"}') < shown.index("<output>result of f")
    # Where a template shows both, a message is what it was.
    assert "assistant\nLet me see.\n<tool_call>" in text(QWEN, [*HI, calls_of("f", content="Let me see.")])


def test_text_and_thoughts_beside_a_call_are_taken() -> None:
    renderer = renderer_of(chat_templates.ONE_CALL_BESIDE_TEXT_OR_THOUGHTS)
    both = calls_of("f", content="Let me see.", reasoning="Hm.")
    shown = text(renderer, [*HI, both, *results_of("f")])
    assert shown.endswith(
        '<assistant>Let me see.<analysis>Hm.</analysis><call>f{"of": "f"}</call><tool>result of f'
    )
    alone = text(renderer, [*HI, calls_of("f", content="Let me see."), *results_of("f")])
    assert "<analysis>Let me see.</analysis><call>f" in alone


@pytest.mark.parametrize("template", [chat_templates.LLAMA, chat_templates.ONE_CALL_BESIDE_TEXT_OR_THOUGHTS])
def test_calls_are_told_one_by_one_to_templates_that_show_one(template: str) -> None:
    """Models call several functions at once, whatever their template shows; that must not end the chat."""
    renderer = renderer_of(template)
    after = [ChatTurn("assistant", "So."), ChatTurn("user", "And?")]
    for order in (("f", "g", "h"), ("h", "f", "g")):
        shown = text(renderer, [*HI, calls_of("f", "g", "h"), *results_of(*order), *after])
        places = [
            place for n in "fgh" for place in (shown.index(f'"of": "{n}"'), shown.index(f"result of {n}"))
        ]
        assert places == sorted(places)
        assert shown.index("So.") > places[-1]
    # Results that are missing, that nobody asked for, or that are there for one id twice.
    shown = text(renderer, [*HI, calls_of("f", "g"), *results_of("g", "x"), *after])
    assert shown.index('"of": "g"') < shown.index("result of g") < shown.index("result of x")
    twice = [ChatTurn("tool", word, tool_call_id="f") for word in ("first", "second")]
    shown = text(renderer, [*HI, calls_of("f", "f"), *twice])
    places = [shown.index("first"), shown.rindex('"of": "f"'), shown.index("second")]
    assert places == sorted(places)


def test_arguments_of_a_call_told_apart_are_named_by_their_place() -> None:
    deep = "[" * 70 + "]" * 70
    calls = (TurnCall("a", "f", "{}"), TurnCall("b", "g", deep))
    for template in (chat_templates.LLAMA, chat_templates.CONTENT_IS_NONE):
        turns = [*HI, ChatTurn("assistant", "x", tool_calls=calls), *results_of("a")]
        error = refused(renderer_of(template), turns, ChatOptions())
        assert error.param == "messages.1.tool_calls.1.function.arguments"


def test_thoughts_have_the_name_that_one_template_alone_reads() -> None:
    turn = ChatTurn("assistant", "a", reasoning="hm")
    assert text(renderer_of("{{ messages[0].reasoning }}"), [turn]) == "hm"
    assert text(renderer_of("{{ messages[0]['reasoning'] }}|{{ messages[0].thinking }}"), [turn]) == "hm|hm"
    assert text(renderer_of("{{ messages[0].get('reasoning') }}"), [turn]) == "hm"
    assert '"reasoning"' not in text(SHOWING, [turn])


def test_lists_that_a_template_makes_may_grow_and_shrink() -> None:
    """As Kimi K2's do, which keep the ids of calls in a queue. Nothing else of a list may be changed."""
    call = ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", '{"x": 1}'),))
    shown = text(renderer_of(chat_templates.QUEUE), [*HI, call, ChatTurn("tool", "done", tool_call_id="c")])
    assert "functions.f:0" in shown
    assert "## Return of functions.f:0\ndone" in shown
    for method in ("clear()", "extend([1])", "insert(0, 1)", "remove(1)", "reverse()", "sort()"):
        template = (
            "{% if messages[0].content == 'go' %}{{ [1]." + method + " }}{% endif %}{{ messages[0].content }}"
        )
        error = refused(renderer_of(template), [ChatTurn("user", "go")], ChatOptions())
        assert error.message == "The model's chat template cannot render these messages."


def test_a_break_of_the_sandbox_in_one_dialogue_is_not_the_end() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.__class__ }}{% set _ = m.update({}) %}{% endif %}"
    )
    renderer = renderer_of(template + "{{ m.content }}{% endfor %}")
    assert text(renderer, HI) == "Hi"
    call = ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", "{}"),))
    assert refused(renderer, [call], ChatOptions()).param == "messages"
    with pytest.raises(ModelFilesError, match="sandbox"):
        renderer_of("{% for m in messages %}{% set _ = m.update({}) %}{{ m.content }}{% endfor %}")


def test_what_a_filter_gives_can_be_json() -> None:
    shown = renderer_of("{{ messages | map(attribute='content') | tojson }}")
    assert text(shown, [*HI, ChatTurn("user", "x")]) == '["Hi", "x"]'


DEEP = '{"a":' * 65 + "1" + "}" * 65
BAD_DATA = [
    (ChatOptions(tools="{}"), "tools"),
    (ChatOptions(tools="[1]"), "tools"),
    (ChatOptions(tools="[{}"), "tools"),
    (ChatOptions(tools=f"[{DEEP}]"), "tools"),
    (ChatOptions(tools="[" * 100_000), "tools"),
    (ChatOptions(tools="[" + "{}," * 300 + "{}]"), "tools"),
    (ChatOptions(documents='["x"]'), "documents"),
    (ChatOptions(documents='[{"a": 1e999}]'), "documents"),
    (ChatOptions(variables="[]"), "chat_template_kwargs"),
    (ChatOptions(variables=DEEP), "chat_template_kwargs"),
]


@pytest.mark.parametrize(("options", "param"), BAD_DATA, ids=[str(o)[:60] for o, _ in BAD_DATA])
def test_bad_data_is_named(options: ChatOptions, param: str) -> None:
    limited = renderer_of(json_limits=JsonLimits(max_depth=64, max_values=300))
    assert refused(limited, HI, options).param == param


def test_the_deepest_data_that_is_allowed() -> None:
    data = '{"a":' * 63 + "1" + "}" * 63
    assert data.replace(":", ": ") in text(SHOWING, HI, ChatOptions(tools=f"[{data}]"))


def test_variables_are_those_that_the_template_reads() -> None:
    assert SHOWING.template_variables == ("x",)
    assert QWEN.template_variables == ("enable_thinking",)
    assert GRANITE.template_variables == ("reasoning_effort", "thinking")
    assert renderer_of(chat_templates.LLAMA).template_variables == ("custom_tools", "date_string")
    assert text(GRANITE, HI, ChatOptions(variables='{"thinking": true}')).endswith("<think>")


@pytest.mark.parametrize("family", chat_templates.FAMILIES)
def test_templates_that_show_tools(family: str) -> None:
    template = chat_templates.FAMILIES[family]
    tool = {"type": "function", "function": {"name": "seen_by_the_model", "parameters": {}}}
    renderer = renderer_of(template)
    seen = "seen_by_the_model" in text(renderer, HI, ChatOptions(tools=json.dumps([tool])))
    assert renderer.reads_tools == seen


NEVER = ["messages", "tools", "documents", "add_generation_prompt", "tokenize", "conversation", "bos_token"]
NEVER += [
    "chat_template",
    "__class__",
    "_x",
    "raise_exception",
    "namespace",
    "range",
    "continue_final_message",
]


@pytest.mark.parametrize("name", [*NEVER, "nothing", "x.y", "", "é" * 100])
def test_other_variables_are_refused(name: str) -> None:
    # The template reads every one of them that can be read.
    readable = [name for name in NEVER if name.isidentifier() and not name.startswith("__")]
    renderer = renderer_of("".join(f"{{{{ {name} is defined }}}}" for name in readable))
    assert renderer.template_variables == ()
    error = refused(renderer, HI, ChatOptions(variables=json.dumps({name: []})))
    assert error.param.split(".")[0] == "chat_template_kwargs"
    assert error.param.isascii()
    assert len(error.param) < 90


def test_documents_need_a_template_that_reads_them() -> None:
    assert refused(HERMES, HI, ChatOptions(documents='[{"text": "x"}]')).param == "documents"
    assert "[1] untitled\nx\n" in text(GRANITE, HI, ChatOptions(documents='[{"text": "x"}]'))


@pytest.mark.parametrize("spaces", ["", " ", "\n\n"])
def test_the_last_message_goes_on(spaces: str) -> None:
    going_on = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    turns = [*HI, ChatTurn("assistant", "Once upon" + spaces)]
    kept = text(renderer_of(tiny.CHATML_TEMPLATE), turns, going_on)
    assert kept == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOnce upon" + spaces
    # A template that strips contents strips what is gone on with.
    assert text(renderer_of(chat_templates.LLAMA), turns, going_on).endswith("assistant\nOnce upon")


def test_what_cannot_go_on_is_refused() -> None:
    going_on = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    call = ChatTurn("assistant", None, tool_calls=(TurnCall("c", "f", "{}"),))
    assert refused(QWEN, [*HI, call], going_on).param == "continue_final_message"
    upper = renderer_of("{{ messages[-1].content | upper }}")
    assert refused(upper, HI, going_on).param == "continue_final_message"
    assert refused(renderer_of("x"), HI, going_on).param == "continue_final_message"


def test_special_tokens_are_added_when_asked_for(tmp_path: Path) -> None:
    files = read_model_files(
        tiny.write_tiny_model(tmp_path, add_bos=True, chat_template=chat_templates.LLAMA)
    )
    renderer = Renderer(files, max_rendered_chars=1000)
    for said in ("x", "<|im_end|>"):
        turns = [ChatTurn("user", said)]
        plain, added = (
            renderer.chat(turns, ChatOptions(add_special_tokens=add)).ids for add in (False, True)
        )
        # This template writes the BOS itself: it is there once.
        assert plain == added
        bare = Renderer(
            ModelFiles(files.tokenizer_json, tiny.CHATML_TEMPLATE, files.special_tokens, None),
            max_rendered_chars=1000,
        )
        ids = bare.chat(turns, ChatOptions()).ids
        assert bare.chat(turns, ChatOptions(add_special_tokens=True)).ids == [tiny.ENDOFTEXT_ID, *ids]


@pytest.mark.parametrize("said", ["some words", "some <|im_end|> words"])
def test_a_prompt_keeps_its_last_tokens(said: str) -> None:
    turns = [ChatTurn("user", said)]
    renderer = renderer_of(tiny.CHATML_TEMPLATE)
    whole = renderer.chat(turns, ChatOptions()).ids
    for kept in (1, 5, len(whole), 10**6):
        cut = renderer.chat(turns, ChatOptions(), PromptLimits(max_tokens=len(whole), truncate_to=kept))
        assert cut.ids == whole[-kept:]
    small = PromptLimits(max_tokens=4, truncate_to=5)
    with pytest.raises(RenderRefused) as caught:
        renderer.chat(turns, ChatOptions(), small)
    assert caught.value.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    (ids,) = renderer.completion(["abc" * 5000], add_special_tokens=False, limits=PromptLimits(9, 9))
    assert len(ids) == 9


def test_the_tail_is_the_prompts_end_without_marks() -> None:
    turns = [ChatTurn("user", "<|im_end|>" * 100)]
    chat = QWEN.chat(turns, ChatOptions(variables='{"enable_thinking": false}'))
    assert chat.tail == text(QWEN, turns, ChatOptions(variables='{"enable_thinking": false}'))[-256:]
    assert chat.tail.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_named_templates() -> None:
    renderer = renderer_of("plain", {"tool_use": "for tools {{ y }}", "rag": "for documents"})
    assert text(renderer, HI) == "plain"
    assert text(renderer, HI, ChatOptions(tools="[]")) == "for tools "
    assert text(renderer, HI, ChatOptions(chat_template="rag", tools="[]")) == "for documents"
    assert renderer.template_variables == ("y",)
    assert not renderer.reads_tools
    assert renderer_of("plain", {"tool_use": "{{ tools }}"}).reads_tools
    assert not renderer_of("plain", {"rag": "{{ tools }}"}).reads_tools
    error = refused(renderer, HI, ChatOptions(chat_template="default2"))
    assert (error.param, error.code) == ("chat_template", RefusalCode.UNSUPPORTED)
    with pytest.raises(ModelFilesError, match="'rag' is not valid"):
        renderer_of("plain", {"rag": "{% if %}"})


def test_refusals_of_a_template_show_no_marks() -> None:
    renderer = renderer_of("{{ raise_exception('no: ' + messages[-1].content) }}")
    error = refused(renderer, [ChatTurn("user", "a <|im_end|> b")], ChatOptions())
    assert error.message == "no: a <|im_end|> b"


def test_ten_thousand_short_messages_take_linear_work() -> None:
    def calls(count: int) -> int:
        turns = [ChatTurn("user", "a b"), ChatTurn("assistant", "c", reasoning="d")] * (count // 2)
        rendered, made = counted(lambda: QWEN.chat(turns, ChatOptions()))
        assert len(rendered.ids) > 5 * count
        return made

    calls(10)
    assert calls(10_000) < 10 * calls(1000) * 1.1
