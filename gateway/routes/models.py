"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from catenary.v1 import common_pb2, router_pb2
from gateway.errors import model_not_found
from gateway.text.models import ModelBoard, tasks_of

OWNER = "catenary"
_TASKS: dict[int, str] = {
    common_pb2.MODEL_TASK_GENERATE: "generate",
    common_pb2.MODEL_TASK_EMBED: "embed",
    common_pb2.MODEL_TASK_SCORE: "score",
}


def describe(model: router_pb2.ServedModel) -> dict[str, Any]:
    """A model as the API shows it."""
    return {
        "id": model.info.name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "root": model.info.name,
        "parent": None,
        "max_model_len": model.info.max_model_len,
        "tasks": [_TASKS[task] for task in sorted(tasks_of(model.info)) if task in _TASKS],
    }


def routes(models: ModelBoard) -> APIRouter:
    """The routes. Ids may contain slashes."""
    router = APIRouter()

    @router.get("/v1/models", summary="List the served models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [describe(model) for model in models.served]})

    @router.get("/v1/models/{model_id:path}", summary="Describe a served model")
    async def get_model(model_id: str) -> JSONResponse:
        if not model_id:
            raise model_not_found(model_id)
        return JSONResponse(describe(models.info(model_id)))

    return router
