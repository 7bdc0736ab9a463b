"""Every parser: what real outputs say, whole and however they are cut."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.parsing.choice import REASONING_PARSERS, TOOL_PARSERS
from gateway.parsing.formats import FORMATS
from gateway.parsing.reasoning import HARMONY as HARMONY_THOUGHTS
from gateway.parsing.reasoning import REASONING
from tests.support.parsed import Output, read
from tests.support.token_outputs import OUTPUTS


@pytest.mark.parametrize(
    "output", OUTPUTS, ids=lambda output: f"{output.parser or output.thinks}-{output.text[:40]!r}"
)
def test_what_models_write_is_read(output: Output) -> None:
    content, reasoning, calls = read(output, [output.text])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call.name, call.arguments) for call in output.calls
    ]
    assert (content, reasoning) == (output.content, output.reasoning)


@pytest.mark.parametrize(
    "output", OUTPUTS, ids=lambda output: f"{output.parser or output.thinks}-{output.text[:40]!r}"
)
def test_cutting_changes_nothing(output: Output) -> None:
    whole = read(output, [output.text])
    assert read(output, list(output.text)) == whole
    for size in (2, 3, 7):
        pieces = [output.text[at : at + size] for at in range(0, len(output.text), size)]
        assert read(output, pieces) == whole


def test_every_parser_has_outputs() -> None:
    tools = Counter(output.parser for output in OUTPUTS)
    thinks = {output.thinks for output in OUTPUTS}
    formats = {FORMATS[name].name if name in FORMATS else name for name in TOOL_PARSERS}
    assert all(tools[name] >= 5 for name in formats)
    read_alike = {
        name: {other for other in REASONING if REASONING[other] is form} for name, form in REASONING.items()
    }
    assert all(thinks & read_alike.get(name, {HARMONY_THOUGHTS}) for name in REASONING_PARSERS)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_cut_anywhere_is_read_alike(data: st.DataObject) -> None:
    """Real outputs, cut short, doubled and damaged."""
    output = data.draw(st.sampled_from(OUTPUTS))
    other = data.draw(st.sampled_from([each for each in OUTPUTS if each.parser == output.parser]))
    text = output.text[: data.draw(st.integers(0, len(output.text)))]
    text += data.draw(st.text("{}[]\"\\<>|:,/'=( )\nfalse1.", max_size=6))
    text += other.text[data.draw(st.integers(0, len(other.text))) :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(Output(output.parser, text, thinks=output.thinks, tail=output.tail), [text])
    cut = Output(output.parser, text, thinks=output.thinks, tail=output.tail)
    assert read(cut, pieces) == whole
    assert read(cut, list(text)) == whole
