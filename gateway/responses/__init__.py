"""OpenAI's Responses API: made from chats, stored, gone on from."""

from __future__ import annotations

from gateway.responses.background import BackgroundRuns
from gateway.responses.events import ResponseEvent
from gateway.responses.items import Item, ItemPage
from gateway.responses.library import Library, page, stored_items
from gateway.responses.objects import InputTokens, Response
from gateway.responses.request import ID_PREFIX
from gateway.responses.service import ResponsesService
from gateway.responses.sqlite import SqliteStore
from gateway.responses.store import ResponseStore, StoreLimits

__all__ = [
    "ID_PREFIX",
    "BackgroundRuns",
    "InputTokens",
    "Item",
    "ItemPage",
    "Library",
    "Response",
    "ResponseEvent",
    "ResponseStore",
    "ResponsesService",
    "SqliteStore",
    "StoreLimits",
    "page",
    "stored_items",
]
