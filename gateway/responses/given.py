"""A request's own input as items with ids, as they are stored and told again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.responses import items
from gateway.schemas import response_items as schema

_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def given_items(given: Sequence[schema.InputItem], new_id: Callable[[str], str]) -> list[items.Item]:
    """The items of a request. An id that the client sent is kept, others get one."""
    return [_item(item, item.id or new_id(_PREFIXES[item.type])) for item in given]


def _item(item: schema.InputItem, item_id: str) -> items.Item:
    status = item.status or items.COMPLETED
    if isinstance(item, schema.MessageItem):
        kind = items.OutputText if item.role == "assistant" else items.InputText
        return items.Message(item_id, item.role, [kind(part.text) for part in item.content], status)
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
