"""The servicer: the engine's gRPC side, and the owner of its core."""

from __future__ import annotations

from services.engine.servicer.admission import Admission, SequenceLimits
from services.engine.servicer.attachment import DrainOrder, KvPublishing
from services.engine.servicer.contract import Identity, model_info
from services.engine.servicer.core import (
    Core,
    CoreEvent,
    CoreRefusal,
    CoreStartError,
    ProcessCore,
    ProgressSink,
    preloaded,
    spawn_process,
)
from services.engine.servicer.frontend import EngineFrontend
from services.engine.servicer.metrics import EngineCollector
from services.engine.servicer.prefix_cache import PrefixCacheMirror
from services.engine.servicer.router_links import LinkTimes, RouterLink, RouterLinks
from services.engine.servicer.routers import RouterOutbox
from services.engine.servicer.status import StatusService
from services.engine.servicer.supervisor import CoreFactory, CoreSupervisor

__all__ = [
    "Admission",
    "Core",
    "CoreEvent",
    "CoreFactory",
    "CoreRefusal",
    "CoreStartError",
    "CoreSupervisor",
    "DrainOrder",
    "EngineCollector",
    "EngineFrontend",
    "Identity",
    "KvPublishing",
    "LinkTimes",
    "PrefixCacheMirror",
    "ProcessCore",
    "ProgressSink",
    "RouterLink",
    "RouterLinks",
    "RouterOutbox",
    "SequenceLimits",
    "StatusService",
    "model_info",
    "preloaded",
    "spawn_process",
]
