"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from catenary.v1 import router_pb2
from gateway.http.answers import json_response
from gateway.openapi.operation import operation
from gateway.openapi.routing import Routes
from gateway.text.models import ModelBoard, task_names

OWNER = "catenary"


class ModelCard(msgspec.Struct):
    """A served model. `max_model_len`: tokens of a prompt with its answer; `tasks`: what it does."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    tasks: list[str]


class ModelList(msgspec.Struct):
    """All models that can be asked."""

    data: list[ModelCard]
    object: str = "list"


def describe(name: str, model: router_pb2.ServedModel) -> ModelCard:
    """A model as the API shows it under one of its names; its `root` is the model's own."""
    info = model.info
    return ModelCard(
        name, "model", model.created, OWNER, info.name, None, info.max_model_len, task_names(info)
    )


def routes(models: ModelBoard) -> Routes:
    """The routes. Ids may contain slashes."""
    router = Routes()

    @router.head("/v1/models", None)
    @router.get("/v1/models", operation("List the served models", ModelList))
    async def list_models() -> Response:
        return json_response(ModelList([describe(*named) for named in models.names]))

    @router.head("/v1/models/{model_id:path}", None)
    @router.get(
        "/v1/models/{model_id:path}", operation("Describe a served model", ModelCard, fails=(404, 503))
    )
    async def get_model(model_id: str) -> Response:
        if not model_id:
            # Clients join the base URL and the path in their own ways.
            return await list_models()
        if model_id.endswith("/") and model_id not in {name for name, _ in models.names}:
            model_id = model_id[:-1]
        return json_response(describe(model_id, models.listed(model_id)))

    return router
