"""Which model is asked, and whether its server has got as far as that."""

from __future__ import annotations

import asyncio
from time import monotonic

import msgspec

from catenary_apps.load.client import Client, Page
from catenary_apps.load.target import BenchError, Target

_ASK_EACH_S = 0.5
# Also where less of the time is left.
_LEAST_S = 2.0
# What does not pass by waiting: a wrong key, a wrong path.
_FINAL = frozenset(range(400, 500)) - {408, 425, 429}


class _Model(msgspec.Struct):
    id: str
    # Other servers do not say what a model is for.
    tasks: tuple[str, ...] = ("generate",)


class _Models(msgspec.Struct):
    data: list[_Model]


class _NotReady(Exception):
    """Why a server cannot be asked yet. `final`: waiting does not help."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


async def find_model(client: Client, target: Target, wait_s: float) -> str:
    """The model to ask: the target's, or the server's first that generates.

    With `wait_s` the server is asked until it lists it, for so many seconds at the most. Without, a model
    that the target names is not looked up. Raises BenchError.
    """
    if target.model is not None and not wait_s:
        return target.model
    deadline = monotonic() + (wait_s or target.timeout_s)
    while True:
        try:
            by = max(deadline, monotonic() + _LEAST_S)
            return _model_of(await client.get("/v1/models", by), target)
        except _NotReady as error:
            if error.final or not wait_s:
                raise BenchError(str(error)) from None
            left = deadline - monotonic()
            if left <= 0:
                raise BenchError(f"after {wait_s:g} s: {error}") from None
        await asyncio.sleep(min(_ASK_EACH_S, left))


def _model_of(page: Page, target: Target) -> str:
    where, wanted = target.base_url, target.model
    if page.failure == "status":
        if wanted is not None and page.status == 404:
            # It answers, and has no such route.
            return wanted
        text = f"{where} answers {page.status} to GET /v1/models ({page.detail})"
        raise _NotReady(text if wanted is not None else f"{text}: name a model", final=page.status in _FINAL)
    if page.failure is not None:
        raise _NotReady(f"no answer from {where}: {page.detail}")
    try:
        models = msgspec.json.decode(page.content, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _NotReady(f"{where} does not list its models: name one", final=True) from None
    names = [model.id for model in models if "generate" in model.tasks]
    if wanted is not None and wanted not in names:
        raise _NotReady(f"{where} does not list the model {wanted}")
    if not names:
        raise _NotReady(f"{where} lists no model that generates (if it is starting, wait: --ready-timeout-s)")
    return wanted or names[0]
