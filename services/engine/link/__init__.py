"""The socket between an engine's servicer process and its core process."""

from __future__ import annotations

from services.engine.link.channel import AsyncLink, BlockingLink
from services.engine.link.framing import (
    DEFAULT_MAX_FRAME_BYTES,
    FrameTooLarge,
    LinkClosed,
    LinkError,
    MalformedFrame,
)
from services.engine.link.messages import (
    AbortSequences,
    CapacityFacts,
    CoreErrorCode,
    CoreFailed,
    CoreLoad,
    CoreProgress,
    CoreReady,
    CoreStep,
    EndRow,
    FinishReason,
    FromCore,
    Message,
    ModelFacts,
    SamplingOptions,
    StartCore,
    StepColumns,
    StopCore,
    SubmitSequence,
    ToCore,
)

__all__ = [
    "DEFAULT_MAX_FRAME_BYTES",
    "AbortSequences",
    "AsyncLink",
    "BlockingLink",
    "CapacityFacts",
    "CoreErrorCode",
    "CoreFailed",
    "CoreLoad",
    "CoreProgress",
    "CoreReady",
    "CoreStep",
    "EndRow",
    "FinishReason",
    "FrameTooLarge",
    "FromCore",
    "LinkClosed",
    "LinkError",
    "MalformedFrame",
    "Message",
    "ModelFacts",
    "SamplingOptions",
    "StartCore",
    "StepColumns",
    "StopCore",
    "SubmitSequence",
    "ToCore",
]
