"""Reading the streams of responses."""

from __future__ import annotations

import json
from typing import Any, get_args

from openai.types.responses import ResponseStreamEvent

from tests.support.http import Answer

RESPONSES = "/v1/responses"
_CLASSES = {
    get_args(event.model_fields["type"].annotation)[0]: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each checked against OpenAI's types and its name against its type."""
    assert answer.status == 200, answer.body
    *parts, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(checked_event(event))
    return events


def checked_event(event: dict[str, Any]) -> dict[str, Any]:
    """The event, after a strict look at it with OpenAI's own types."""
    _CLASSES[event["type"]].model_validate_json(json.dumps(event), strict=True)
    return event
