"""Registry of served models, and their vocabularies, without which the gateway cannot decode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from catenary.backoff import Backoff
from catenary.telemetry import get_logger
from catenary.text import TokenizerTraits, Vocabulary
from catenary.v1 import common_pb2, router_pb2
from gateway.errors import ApiError, bad_request, model_not_found, unavailable

_log = get_logger(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_GENERATE: tuple[int, ...] = (common_pb2.MODEL_TASK_GENERATE,)
_INSTEAD: dict[int, str] = {
    common_pb2.MODEL_TASK_GENERATE: (
        "This model generates text: use /v1/chat/completions, /v1/completions or /v1/responses."
    ),
    common_pb2.MODEL_TASK_EMBED: "This model makes embeddings: use /v1/embeddings, /v1/rerank or /v1/score.",
    common_pb2.MODEL_TASK_SCORE: "This model scores pairs of texts: use /v1/rerank or /v1/score.",
    common_pb2.MODEL_TASK_CLASSIFY: "This model classifies texts: use /classify or /pooling.",
}
_NAMES: dict[int, str] = {
    common_pb2.MODEL_TASK_GENERATE: "generate",
    common_pb2.MODEL_TASK_EMBED: "embed",
    common_pb2.MODEL_TASK_SCORE: "score",
    common_pb2.MODEL_TASK_CLASSIFY: "classify",
}

Fetch = Callable[[str], Awaitable[Vocabulary]]
Models = Mapping[str, router_pb2.ServedModel]
"""One router's models by name."""


def tasks_of(info: common_pb2.ModelInfo) -> frozenset[int]:
    return frozenset(info.tasks or _GENERATE)


def task_names(info: common_pb2.ModelInfo) -> list[str]:
    return [_NAMES[task] for task in sorted(tasks_of(info)) if task in _NAMES]


@dataclass(frozen=True, slots=True)
class Model:
    """Model that can be used now."""

    name: str
    max_model_len: int
    vocab_size: int
    vocabulary: Vocabulary
    info: common_pb2.ModelInfo = field(default_factory=common_pb2.ModelInfo)
    """Its entry in the router's list."""
    alias: str = ""
    """Name by which it was requested, if that is not its own."""

    @property
    def asked(self) -> str:
        """Name by which it was requested, which answers repeat."""
        return self.alias or self.name

    @property
    def tasks(self) -> frozenset[int]:
        return tasks_of(self.info)

    @property
    def traits(self) -> TokenizerTraits:
        return self.vocabulary.traits


def merged(
    routers: Sequence[Models], awaited: Iterable[router_pb2.ServedModel] = ()
) -> list[router_pb2.ServedModel]:
    """Return one entry for each model of any router.

    Every engine attaches to every router, so numbers of engines and loads are not added up: they are those of
    the router with most of the engines. The context is the shortest of all. A model of `awaited` that no
    router has is listed without engines."""
    found: dict[str, list[router_pb2.ServedModel]] = {}
    for models in routers:
        for name, model in models.items():
            found.setdefault(name, []).append(model)
    for model in awaited:
        if model.info.name not in found:
            found[model.info.name] = [_without_engines(model)]
    return [_best(models) for models in found.values()]


def _best(models: Sequence[router_pb2.ServedModel]) -> router_pb2.ServedModel:
    best = max(models, key=lambda model: model.serving_engines)
    if len(models) == 1:
        return best
    one = router_pb2.ServedModel()
    one.CopyFrom(best)
    serving = [model for model in models if model.serving_engines] or models
    one.info.max_model_len = min(model.info.max_model_len for model in serving)
    one.created = min(model.created for model in models)
    return one


def _without_engines(model: router_pb2.ServedModel) -> router_pb2.ServedModel:
    return router_pb2.ServedModel(info=model.info, created=model.created, load=router_pb2.ModelLoad())


class ModelRegistry:
    """Models that the routers listed last, with the vocabulary of each.

    A model that is no longer served is awaited for `wait_s`, since its engines or its router may come back:
    requests for it are accepted, and wait."""

    def __init__(
        self, fetch: Fetch, aliases: Mapping[str, str] | None = None, *, wait_s: float = 0.0
    ) -> None:
        """Make an empty registry.

        Args:
            fetch: fetches the vocabulary of a model.
            aliases: model names by alias. A served model's own name goes before an equal alias.
            wait_s: for which a model is awaited.
        """
        self._aliases = dict(aliases or {})
        self._fetch = fetch
        self._wait_s = wait_s
        self._online = False
        self._serving: Models = {}
        # Models that were served a moment ago, with the time until which they are awaited.
        self._awaited: dict[str, tuple[float, router_pb2.ServedModel]] = {}
        self._served: dict[str, router_pb2.ServedModel] = {}
        self._vocabularies: dict[str, Vocabulary] = {}
        self._changed = asyncio.Event()

    @property
    def served(self) -> list[router_pb2.ServedModel]:
        return [self._served[name] for name in sorted(self._served)]

    @property
    def names(self) -> list[tuple[str, router_pb2.ServedModel]]:
        """Names that requests may use, each with its model: a model's own name, then its aliases.

        A model whose tokenizer is not loaded yet is left out: clients use the first model of the list, and
        their requests would be refused."""
        found = []
        for model in self.served:
            if self._usable(model) is None:
                continue
            own = model.info.name
            more = [
                alias for alias, name in self._aliases.items() if name == own and alias not in self._served
            ]
            found += [(name, model) for name in (own, *more)]
        return found

    def awaits(self, name: str) -> bool:
        """Return whether a model without a serving engine was served a moment ago."""
        awaited = self._awaited.get(name)
        return awaited is not None and asyncio.get_running_loop().time() < awaited[0]

    def take(self, routers: Sequence[Models]) -> None:
        """Take the models of each connected router. Without a router the last list stands, unserved."""
        until = asyncio.get_running_loop().time() + self._wait_s
        self._awaited |= {name: (until, model) for name, model in self._serving.items()}
        self._serving = {
            name: model for models in routers for name, model in models.items() if model.serving_engines
        }
        self._awaited = {
            name: awaited
            for name, awaited in self._awaited.items()
            if name not in self._serving and self.awaits(name)
        }
        if routers:
            self.update(merged(routers, [model for _, model in self._awaited.values()]))
        else:
            self._online = False

    def update(self, models: Sequence[router_pb2.ServedModel]) -> None:
        self._online = True
        self._served = {model.info.name: model for model in models}
        self._changed.set()

    def info(self, name: str) -> router_pb2.ServedModel:
        """Return a model by one of its names. Raise ApiError 404."""
        found = self._find(name)
        if found is None:
            raise model_not_found(name, [known for known, _ in self.names])
        return found

    def only(self) -> str | None:
        """Return the name of the only model, for a request that names none; None if there are several.

        Raise ApiError 503 if none is served yet."""
        if not self._served:
            raise unavailable("No model is being served yet.")
        return next(iter(self._served)) if len(self._served) == 1 else None

    def require(self, name: str, tasks: Collection[int] | None = _GENERATE) -> Model:
        """Return a model for one of these tasks, or for any (None); the default is generation.

        Raise ApiError: 404 for an unknown model, 400 if its tasks are others, 503 if no engine serves it now.
        """
        if not self._served:
            raise unavailable("No model is being served yet.")
        served = self.info(name)
        own = tasks_of(served.info)
        if tasks is not None and own.isdisjoint(tasks):
            raise bad_request(_INSTEAD[min(own)], "model", "unsupported_value")
        online = self._online and served.serving_engines
        if not online and not self.awaits(served.info.name):
            raise unavailable("No engine is serving the model at the moment.")
        return self.known(name)

    def listed(self, name: str) -> router_pb2.ServedModel:
        """Return a model of `names`. Raise ApiError: 404, or 503 if its tokenizer is not loaded yet."""
        self.known(name)
        return self.info(name)

    def known(self, name: str) -> Model:
        """Return a model, served now or not. Raise ApiError: 404, or 503 without a tokenizer."""
        served = self.info(name)
        vocabulary = self._usable(served)
        if vocabulary is None:
            raise unavailable("The model's tokenizer is not loaded yet.", code="tokenizer_unavailable")
        info = served.info
        alias = "" if name == info.name else name
        return Model(info.name, info.max_model_len, info.vocab_size, vocabulary, info, alias)

    def serves(self, name: str) -> bool:
        """Return whether requests for a model can be answered now. "": the only one that is served."""
        if not self._online or not self._served:
            return False
        served = self._find(name or self.only() or "")
        return served is not None and bool(served.serving_engines) and self._usable(served) is not None

    @property
    def ready(self) -> bool:
        """Whether at least one model can be used."""
        return self._online and any(
            model.serving_engines and self._usable(model) for model in self._served.values()
        )

    async def run(self) -> None:
        """Fetch the vocabularies that are missing or have changed, until cancelled."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            await self._changed.wait()
            self._changed.clear()
            if await self.refresh():
                backoff.reset()
            else:
                await asyncio.sleep(backoff.next_delay())
                self._changed.set()

    async def refresh(self) -> bool:
        """Fetch the vocabularies that are missing or have changed. Return whether all are loaded then."""
        for model in list(self._served.values()):
            if self._usable(model) is None:
                await self._load(model)
        return all(self._usable(model) for model in self._served.values())

    def _find(self, name: str) -> router_pb2.ServedModel | None:
        return self._served.get(name) or self._served.get(self._aliases.get(name, ""))

    def _usable(self, model: router_pb2.ServedModel) -> Vocabulary | None:
        vocabulary = self._vocabularies.get(model.info.name)
        expected = model.info.tokenizer_sha256
        if vocabulary is None or (expected and vocabulary.sha256 != expected):
            return None
        return vocabulary

    async def _load(self, model: router_pb2.ServedModel) -> None:
        name = model.info.name
        try:
            vocabulary = await self._fetch(name)
        except (ApiError, ValueError) as error:
            _log.warning("tokenizer not loaded", model=name, reason=str(error))
            return
        expected = model.info.tokenizer_sha256
        if expected and vocabulary.sha256 != expected:
            _log.error("engine and tokenizer service have different tokenizers", model=name)
            return
        self._vocabularies[name] = vocabulary
        _log.info("tokenizer loaded", model=name, sha256=vocabulary.sha256[:12])
