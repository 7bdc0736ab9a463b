"""What a chat becomes: templates of many kinds, over the tiny tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.rendering import (
    ChatOptions,
    ChatTurn,
    ModelFilesError,
    RefusalCode,
    Renderer,
    RenderRefused,
    read_model_files,
)
from tests.support import tiny_tokenizer as tiny

MakeRenderer = Callable[..., Renderer]


@pytest.fixture
def make_renderer(tmp_path: Path) -> MakeRenderer:
    def make(template: str | None = tiny.CHATML_TEMPLATE, *, add_bos: bool = False) -> Renderer:
        directory = tiny.write_tiny_model(tmp_path / "model", chat_template=template, add_bos=add_bos)
        return Renderer(read_model_files(directory), max_rendered_chars=1_000_000)

    return make


def chat(renderer: Renderer, *turns: tuple[Any, ...], generate: bool = True) -> list[int]:
    messages = [ChatTurn(*turn) for turn in turns]
    return renderer.chat(messages, ChatOptions(add_generation_prompt=generate)).ids


def chat_text(renderer: Renderer, *turns: tuple[str, ...], generate: bool = True) -> str:
    return renderer.detokenize(chat(renderer, *turns, generate=generate), skip_special_tokens=False)


def refusal(renderer: Renderer, *turns: tuple[Any, ...]) -> RenderRefused:
    with pytest.raises(RenderRefused) as caught:
        chat(renderer, *turns)
    return caught.value


def test_chatml(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer()
    ids = chat(renderer, ("system", "Be brief."), ("user", "Hi"))
    assert ids.count(tiny.IM_START_ID) == 3
    assert ids.count(tiny.IM_END_ID) == 2
    assert chat_text(renderer, ("user", "héllo 日本 🙂"), generate=False) == (
        "<|im_start|>user\nhéllo 日本 🙂<|im_end|>\n"
    )


@pytest.mark.parametrize("texts", [["s"], ["s", "t", "u"]])
def test_all_system_messages_are_kept_in_order(make_renderer: MakeRenderer, texts: list[str]) -> None:
    text = chat_text(make_renderer(), *(("system", f"rule {word}") for word in texts))
    assert [text.index(f"rule {word}") for word in texts] == sorted(text.index(f"rule {w}") for w in texts)


def test_developer_is_shown_as_system(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer()
    assert chat(renderer, ("developer", "x")) == chat(renderer, ("system", "x"))


def test_a_template_that_reads_parts_gets_parts(make_renderer: MakeRenderer) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
    )
    assert chat_text(make_renderer(template), ("user", "one"), ("user", "two")) == "user:one;user:two;"


def test_name_and_special_tokens_reach_the_template(make_renderer: MakeRenderer) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.name | default('-') }}={{ m.content }};{% endfor %}"
    )
    text = chat_text(make_renderer(template), ("user", "a", "Ann"), ("user", "b"))
    assert text == "<|im_start|>Ann=a;-=b;"


def test_what_hugging_face_templates_use(make_renderer: MakeRenderer) -> None:
    template = """{% generation %}g{% endgeneration %}
{% set ns = namespace(n=0) %}
{% for m in messages %}
    {% if m.content == 'stop' %}
        {% break %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
{% endfor %}
{{ ns.n }} {{ {'k': 'é<'} | tojson }} {{ strftime_now('%Y') | length }} {{ tools is none }}"""
    text = chat_text(make_renderer(template), ("user", "a"), ("user", "stop"), ("user", "b"))
    assert text == 'g1 {"k": "é<"} 4 True'


def test_raise_exception_speaks_to_the_caller_on_one_bounded_line(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("{{ raise_exception('Roles must\n alternate ' + messages[0].content) }}")
    error = refusal(renderer, ("user", "x" * 5000))
    assert error.code is RefusalCode.INVALID_ARGUMENT
    assert error.param == "messages"
    assert error.message.startswith("Roles must alternate xxx")
    assert len(error.message) == 500


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[5].content.foo }}",
        "{{ 1 / 0 }}",
        "{{ messages | nofilter if false else messages.clear() }}",
        "{% for m in messages %}{% set _ = messages.append(m) %}{% endfor %}",
        "{% for i in range(10**10) %}x{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ {} | tojson(indent=messages) }}",
        "{% set ns = namespace(__class__=1) %}",
    ],
)
def test_other_failures_have_a_fixed_text(make_renderer: MakeRenderer, template: str) -> None:
    try:
        renderer = make_renderer(template)
    except ModelFilesError:
        return
    message = refusal(renderer, ("user", "x")).message
    assert message == "The model's chat template cannot render these messages."


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__}'|attr('format')(1) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(make_renderer: MakeRenderer, template: str) -> None:
    try:
        renderer = make_renderer(template)
    except ModelFilesError as error:
        assert "sandbox" in str(error)  # noqa: PT017
        return
    with pytest.raises(RenderRefused):
        chat(renderer, ("user", "x"))


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages", "{% endif %}", "{{ x | unknown_filter }}"])
def test_a_bad_template_is_refused_at_the_start(make_renderer: MakeRenderer, template: str) -> None:
    with pytest.raises(ModelFilesError, match="chat template is not valid") as caught:
        make_renderer(template)
    assert "\n" not in str(caught.value)


def test_a_template_may_not_write_without_end(make_renderer: MakeRenderer) -> None:
    loop = "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}"
    template = "{% if messages[0].content == 'go' %}" + loop + "{% endif %}"
    assert "longer than 1000000 characters" in refusal(make_renderer(template), ("user", "go")).message


def test_a_model_without_a_template_refuses_chats_only(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer(None)
    error = refusal(renderer, ("user", "x"))
    assert error.code is RefusalCode.UNSUPPORTED
    assert "no chat template" in error.message
    assert renderer.completion(["x"], add_special_tokens=True)


def test_a_chat_never_has_a_second_bos(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("{{ bos_token }}{{ messages[0].content }}", add_bos=True)
    assert chat(renderer, ("user", "x")) == [tiny.ENDOFTEXT_ID, tiny.byte_id(ord("x"))]


def test_an_empty_prompt_is_refused(make_renderer: MakeRenderer) -> None:
    assert "no tokens" in refusal(make_renderer("{{ messages[0].content }}"), ("user", "")).message
