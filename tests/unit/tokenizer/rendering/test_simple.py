"""Templates that can do nothing that takes long, and those that could."""

from __future__ import annotations

import pytest

from services.tokenizer.rendering.simple import is_simple
from services.tokenizer.rendering.template import sandbox
from tests.support.chat_templates import FAMILIES
from tests.support.tiny_tokenizer import CHATML_TEMPLATE

_NAMESPACE = "{% set ns = namespace(s='a') %}"
_EACH = "{% for m in messages %}BODY{% endfor %}"

_SIMPLE = {
    "chatml": CHATML_TEMPLATE,
    **{name: source for name, source in FAMILIES.items() if name != "granite"},
    "counter": _NAMESPACE + _EACH.replace("BODY", "{% set ns.s = ns.s + 1 %}"),
    "last": _NAMESPACE + _EACH.replace("BODY", "{% set ns.s = m.content %}"),
    "reversed": "{% for m in messages[::-1] %}{{ m['content'] | trim }}{% endfor %}",
    "parts": "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "no calls": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}",
    "put together": "{% set a = messages[0].content ~ '!' %}{{ a ~ a }}",
}
_OTHERS = {
    "many turns": "{% for i in range(1000000000) %}x{% endfor %}",
    "squares": _EACH.replace("BODY", _EACH.replace("BODY", "x")),
    "three loops": "{% for a in tools %}{% for b in tools %}{% for c in tools %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "recursive": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "doubles": _NAMESPACE + _EACH.replace("BODY", "{% set ns.s = ns.s ~ ns.s %}"),
    "adds": _NAMESPACE + _EACH.replace("BODY", "{% set ns.s = ns.s + ns.s %}"),
    "doubles by a name": _NAMESPACE
    + _EACH.replace("BODY", "{% set y = ns.s ~ ns.s %}{% set z = y %}{% set ns.s = z %}"),
    "doubles by a loop": _NAMESPACE
    + _EACH.replace("BODY", "{% for y in [ns.s ~ ns.s] %}{% set ns.s = y %}{% endfor %}"),
    "doubles by a tuple": _NAMESPACE + _EACH.replace("BODY", "{% set ns.s = (ns.s, ns.s) %}"),
    "quotes again and again": _NAMESPACE + _EACH.replace("BODY", "{% set ns.s = ns.s | tojson %}"),
    "quotes what was quoted": "{{ messages | tojson | tojson }}",
    "quotes what was named": "{% set a = messages | tojson %}{{ a | tojson }}",
    "grows by names": "{% set a = messages[0].content %}" + "{% set a = a ~ a ~ a %}" * 4 + "{{ a }}",
    "indents": "{{ messages | tojson(indent=1000000) }}",
    "repeats": "{{ 'a' * 1000000 }}",
    "powers": "{{ 10 ** 100000 }}",
    "formats": "{{ '%1000000d' % 1 }}",
    "formats by a filter": "{{ '%1000000d' | format(1) }}",
    "formats by a method": "{{ '{:>1000000}'.format(1) }}",
    "centers": "{{ 'a' | center(1000000) }}",
    "fills": "{{ 'a'.ljust(1000000) }}",
    "replaces": "{{ messages[0].content | replace('a', messages[1].content) }}",
    "joins": "{{ messages[0].content | join(messages[1].content) }}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block": "{% set a %}{{ messages }}{% endset %}",
    "function": "{{ lipsum() }}",
    "any method": "{{ messages.clear() }}",
    "arguments": "{{ 'a'.split(*messages) }}",
    "attribute": "{{ messages.__class__ }}",
    "attribute by a filter": "{{ messages | attr('append') }}",
    "mapped": "{{ messages | map(attribute='content') | list }}",
    "includes": "{% include 'other' %}",
}


@pytest.mark.parametrize("source", _SIMPLE.values(), ids=_SIMPLE)
def test_templates_that_walk_compare_and_join_are_simple(source: str) -> None:
    assert is_simple(sandbox().parse(source))


@pytest.mark.parametrize("source", _OTHERS.values(), ids=_OTHERS)
def test_what_can_take_long_grow_or_call_is_not(source: str) -> None:
    assert not is_simple(sandbox().parse(source))
