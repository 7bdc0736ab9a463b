"""The models that several routers tell of, as one view of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from catenary.v1 import router_pb2

Models = Mapping[str, router_pb2.ServedModel]


class ServedModels:
    """The models that the routers serve together. One that has gone is awaited for `wait_s`, since its
    engines or its router may come back."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._serving: Models = {}
        # Those that were served a moment ago, until when they are waited for.
        self._awaited: dict[str, tuple[float, router_pb2.ServedModel]] = {}

    def awaits(self, model: str, now: float) -> bool:
        """Whether a model without a serving engine was served a moment ago."""
        awaited = self._awaited.get(model)
        return awaited is not None and now < awaited[0]

    def update(self, routers: Sequence[Models], now: float) -> list[router_pb2.ServedModel]:
        """Take over what each router tells now. Returns all models, awaited ones too: see `merged`."""
        until = now + self._wait_s
        self._awaited |= {name: (until, model) for name, model in self._serving.items()}
        self._serving = {
            name: model for models in routers for name, model in models.items() if model.serving_engines
        }
        self._awaited = {
            name: awaited
            for name, awaited in self._awaited.items()
            if name not in self._serving and self.awaits(name, now)
        }
        return merged(routers, [model for _, model in self._awaited.values()])


def merged(
    routers: Sequence[Models], awaited: Iterable[router_pb2.ServedModel] = ()
) -> list[router_pb2.ServedModel]:
    """One entry for each model that a router tells of.

    Every engine attaches to every router, so numbers of engines and loads are not added up: they are those
    of the router that has most of the engines. The context is the shortest of any. A model of `awaited` that
    no router tells of is listed without engines.
    """
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
