"""Leaving out the beginning of a chat that does not fit into the model's context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from gateway.errors import ApiError
from gateway.schemas.messages import ChatMessage
from gateway.text.rendered import Rendered

Render = Callable[[list[ChatMessage]], Awaitable[Rendered]]
"""A chat's prompt. Raises ApiError `context_length_exceeded` if it is too long."""

_KEPT = ("system", "developer")
_TOO_LONG = "context_length_exceeded"


def droppable(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """What may be left out, oldest first: indexes of messages that go together.

    First come whole turns, each a user's message with all that follows up to the next one. Of the last turn
    then the rounds behind the user's message, each an assistant's message with the results of its calls, but
    never the last one. Instructions are in none."""
    turns: list[list[int]] = [[]]
    for index, message in enumerate(messages):
        if message.role in _KEPT:
            continue
        if message.role == "user":
            turns.append([])
        turns[-1].append(index)
    *earlier, last = turns
    rounds: list[list[int]] = []
    for index in last:
        if messages[index].role == "user":
            continue
        if not rounds or messages[index].role == "assistant":
            rounds.append([])
        rounds[-1].append(index)
    return [turn for turn in earlier if turn] + rounds[:-1]


async def fitted(messages: Sequence[ChatMessage], render: Render) -> Rendered:
    """The prompt of a chat, without so many of its oldest turns that it fits.

    Few are rendered: their number is halved each time. Raises ApiError: as `render` does for the whole chat
    if it does not fit without all that may be left out."""
    try:
        return await render(list(messages))
    except ApiError as error:
        if error.code != _TOO_LONG:
            raise
        whole = error
    parts = droppable(messages)
    found, most, least = None, len(parts), 1
    while least <= most:
        # The first time all go: a chat that is too long even then is the common one of those that never fit.
        count = most if found is None else (least + most) // 2
        gone = {index for part in parts[:count] for index in part}
        try:
            found = await render([message for index, message in enumerate(messages) if index not in gone])
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            if found is None:
                break
            least = count + 1
        else:
            most = count - 1
    if found is None:
        raise whole
    return found
