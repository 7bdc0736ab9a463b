"""The states of a sequence in the router, its events, and the one table of transitions. Pure.

`LiveSequence.apply` alone follows the table; docs/design/routing.md prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class SequenceState(StrEnum):
    """The states of a live sequence."""

    ADMITTED = "admitted"
    FOLLOWING = "following"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    PLACED = "placed"
    RUNNING = "running"
    ABORTING = "aborting"
    ENDED = "ended"
    REFUSED = "refused"


class SequenceEvent(StrEnum):
    """The events of a live sequence."""

    FOLLOW = "follow"
    ENQUEUE = "enqueue"
    PLACE_PROMPT = "place prompt"
    PLACE = "place"
    OUTPUT = "output"
    ABORT = "abort"
    END = "end"
    REFUSE = "refuse"


class Action(StrEnum):
    """The change of a sequence's load that comes with a transition; `LoadGuard` does the counting."""

    # Nothing changes.
    NONE = "none"
    # Load the engine that was chosen, and unload the one that had the sequence.
    LOAD = "load"
    # Unload the engine.
    UNLOAD = "unload"
    # Count the prompt as computed.
    PREFILLED = "prefilled"
    # Unload the engine, and count the sequence as live no more.
    RELEASE = "release"


class Transition(NamedTuple):
    """The state that follows, and what happens to the load."""

    state: SequenceState
    action: Action


class IllegalEvent(RuntimeError):
    """An event that the state of a sequence does not allow: a fault of the router."""

    def __init__(self, state: SequenceState, event: SequenceEvent) -> None:
        super().__init__(f"a sequence that is {state} has no event {str(event)!r}")


# Text for the documents.
STATES: Mapping[SequenceState, str] = {
    SequenceState.ADMITTED: "counted; the call that submits it has neither placed nor queued it yet",
    SequenceState.FOLLOWING: "waits until the prompt that it shares with another sequence is computed",
    SequenceState.QUEUED: "waits in the admission queue of its model",
    SequenceState.PREFILLING: "an engine computes its prompt for another engine (prefill/decode split)",
    SequenceState.PLACED: "submitted to an engine that has emitted nothing yet: another one may be tried",
    SequenceState.RUNNING: "its engine has emitted output",
    SequenceState.ABORTING: "an abort is sent; the load counts until the engine confirms it, or time is up",
    SequenceState.ENDED: "its client has got an end, or is gone; final",
    SequenceState.REFUSED: "its client has got a refusal; final",
}
EVENTS: Mapping[SequenceEvent, str] = {
    SequenceEvent.FOLLOW: "another sequence computes the same prompt for the split",
    SequenceEvent.ENQUEUE: "no engine has room now, or none that was asked",
    SequenceEvent.PLACE_PROMPT: "placement chose an engine for the prompt alone",
    SequenceEvent.PLACE: "placement chose an engine for the whole sequence, or for what follows the prompt",
    SequenceEvent.OUTPUT: "the first output of the engine came",
    SequenceEvent.ABORT: "the client aborted it or is gone, or its engine is stalled or drains",
    SequenceEvent.END: "its engine ended it, confirmed its abort or was lost; or it was aborted as it waited",
    SequenceEvent.REFUSE: "no engine takes it, or it waited too long",
}

_S, _E = SequenceState, SequenceEvent
TRANSITIONS: Mapping[tuple[SequenceState, SequenceEvent], Transition] = {
    (_S.ADMITTED, _E.FOLLOW): Transition(_S.FOLLOWING, Action.NONE),
    (_S.ADMITTED, _E.ENQUEUE): Transition(_S.QUEUED, Action.NONE),
    (_S.ADMITTED, _E.PLACE_PROMPT): Transition(_S.PREFILLING, Action.LOAD),
    (_S.ADMITTED, _E.PLACE): Transition(_S.PLACED, Action.LOAD),
    (_S.ADMITTED, _E.REFUSE): Transition(_S.REFUSED, Action.RELEASE),
    (_S.FOLLOWING, _E.ENQUEUE): Transition(_S.QUEUED, Action.NONE),
    (_S.FOLLOWING, _E.PLACE): Transition(_S.PLACED, Action.LOAD),
    (_S.FOLLOWING, _E.END): Transition(_S.ENDED, Action.RELEASE),
    (_S.FOLLOWING, _E.REFUSE): Transition(_S.REFUSED, Action.RELEASE),
    (_S.QUEUED, _E.PLACE_PROMPT): Transition(_S.PREFILLING, Action.LOAD),
    (_S.QUEUED, _E.PLACE): Transition(_S.PLACED, Action.LOAD),
    (_S.QUEUED, _E.END): Transition(_S.ENDED, Action.RELEASE),
    (_S.QUEUED, _E.REFUSE): Transition(_S.REFUSED, Action.RELEASE),
    (_S.PREFILLING, _E.OUTPUT): Transition(_S.PREFILLING, Action.PREFILLED),
    (_S.PREFILLING, _E.PLACE): Transition(_S.PLACED, Action.LOAD),
    (_S.PREFILLING, _E.ENQUEUE): Transition(_S.QUEUED, Action.UNLOAD),
    (_S.PREFILLING, _E.ABORT): Transition(_S.ABORTING, Action.NONE),
    (_S.PREFILLING, _E.END): Transition(_S.ENDED, Action.RELEASE),
    (_S.PREFILLING, _E.REFUSE): Transition(_S.REFUSED, Action.RELEASE),
    (_S.PLACED, _E.OUTPUT): Transition(_S.RUNNING, Action.PREFILLED),
    (_S.PLACED, _E.PLACE): Transition(_S.PLACED, Action.LOAD),
    (_S.PLACED, _E.ENQUEUE): Transition(_S.QUEUED, Action.UNLOAD),
    (_S.PLACED, _E.ABORT): Transition(_S.ABORTING, Action.NONE),
    (_S.PLACED, _E.END): Transition(_S.ENDED, Action.RELEASE),
    (_S.PLACED, _E.REFUSE): Transition(_S.REFUSED, Action.RELEASE),
    (_S.RUNNING, _E.ABORT): Transition(_S.ABORTING, Action.NONE),
    (_S.RUNNING, _E.END): Transition(_S.ENDED, Action.RELEASE),
    (_S.ABORTING, _E.END): Transition(_S.ENDED, Action.RELEASE),
}
# States in which an engine has the sequence, and those that nothing follows.
ON_ENGINE = frozenset({_S.PREFILLING, _S.PLACED, _S.RUNNING, _S.ABORTING})
FINAL = frozenset({_S.ENDED, _S.REFUSED})
