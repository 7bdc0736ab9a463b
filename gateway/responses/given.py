"""A request's own input as items with ids, as they are stored and told again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import UNSET

from gateway.responses import items
from gateway.schemas import response_items as schema

_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def given_items(
    given: Sequence[schema.InputItem], new_id: Callable[[str], str], stored: Mapping[str, items.Item]
) -> list[items.Item]:
    """The items of a request. An id that the client sent is kept, others get one.

    `stored`: what references refer to."""
    return [
        stored[item.id]
        if isinstance(item, schema.ItemReference)
        else _item(item, item.id or new_id(_PREFIXES[item.type]))
        for item in given
    ]


def references(given: Sequence[schema.InputItem]) -> dict[int, str]:
    """The ids of the stored items that an input refers to, by their places."""
    return {place: item.id for place, item in enumerate(given) if isinstance(item, schema.ItemReference)}


def _item(item: schema.WholeItem, item_id: str) -> items.Item:
    status = item.status or items.COMPLETED
    if isinstance(item, schema.MessageItem):
        kind = items.OutputText if item.role == "assistant" else items.InputText
        parts = [kind(part.text) for part in item.content]
        return items.ResponseMessage(
            item_id, item.role, parts, status, UNSET if item.phase is None else item.phase
        )
    if isinstance(item, schema.FunctionCallItem):
        return items.FunctionCall(item_id, item.call_id, item.name, item.arguments, status)
    if isinstance(item, schema.FunctionCallOutputItem):
        output = [items.InputText(part.text) for part in item.output]
        return items.FunctionCallOutput(item_id, item.call_id, output, status)
    return items.Reasoning(
        item_id,
        [items.SummaryText(part.text) for part in item.summary],
        [items.ReasoningText(part.text) for part in item.content or ()],
        status,
    )
