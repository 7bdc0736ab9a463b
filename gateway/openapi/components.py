"""The document's schemas: requests from pydantic's models, answers from msgspec's types."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, get_origin

import msgspec
import pydantic.json_schema
from msgspec import UNSET, inspect

from gateway.schemas.base import RequestModel

Schema = dict[str, Any]
_PLACE = "#/components/schemas/"


class Components:
    """All schemas, and references to them."""

    def __init__(self, answers: Sequence[Any], requests: Sequence[type[RequestModel]]) -> None:
        """`answers`: msgspec types, written as JSON somewhere; `requests`: models, read somewhere."""
        self.schemas: dict[str, Schema] = {}
        self._answers = dict(zip(answers, self._add_answers(answers), strict=True))
        self._requests = self._add_requests(requests)

    def answer(self, written: Any) -> Schema:
        """The schema of a type that is written, or of a tuple of types of which one is."""
        if isinstance(written, tuple):
            return {"anyOf": [self._answers[alternative] for alternative in written]}
        schema: Schema = self._answers[written]
        return schema

    def request(self, model: type[RequestModel]) -> Schema:
        """The schema of a model that is read."""
        return self._requests[model]

    def with_fields(
        self, model: type[RequestModel], other: type[RequestModel], names: Collection[str]
    ) -> Schema:
        """The schema of a model that has the named fields of another one besides its own."""
        own, lender = (self._definition(self.request(each)) for each in (model, other))
        lent = {name: schema for name, schema in lender["properties"].items() if name in names}
        return {**own, "properties": {**lent, **own["properties"]}}

    def _definition(self, reference: Schema) -> Schema:
        return self.schemas[reference["$ref"].removeprefix(_PLACE)]

    def _add_answers(self, answers: Sequence[Any]) -> Sequence[Schema]:
        structs = list(dict.fromkeys(_structs(inspect.multi_type_info(answers))))
        found, components = msgspec.json.schema_components(
            [*answers, *structs], ref_template=_PLACE + "{name}"
        )
        for struct, reference in zip(structs, found[len(answers) :], strict=True):
            required = _always_written(struct)
            schema = components[reference["$ref"].removeprefix(_PLACE)]
            # A tag comes first, and is always written.
            tag = [name for name in schema.get("required", ()) if name == _config(struct).tag_field]
            schema["required"] = [*tag, *required]
        self.schemas |= components
        return found[: len(answers)]

    def _add_requests(self, models: Sequence[type[RequestModel]]) -> dict[type[RequestModel], Schema]:
        template = _PLACE + "{model}"
        references, defined = pydantic.json_schema.models_json_schema(
            [(model, "validation") for model in models], ref_template=template
        )
        definitions: dict[str, Schema] = defined.get("$defs", {})
        # A name may stand for what is read and for what is written.
        names = {
            f"{_PLACE}{name}": f"{_PLACE}{name}Request" if name in self.schemas else f"{_PLACE}{name}"
            for name in definitions
        }
        for name, schema in definitions.items():
            self.schemas[names[f"{_PLACE}{name}"].removeprefix(_PLACE)] = _renamed(schema, names)
        return {model: _renamed(references[model, "validation"], names) for model in models}


def _structs(types: Iterable[inspect.Type]) -> Iterator[type[msgspec.Struct]]:
    """The structs in types, however deep."""
    seen: set[type[msgspec.Struct]] = set()
    waiting: list[Any] = list(types)
    while waiting:
        node = waiting.pop()
        if isinstance(node, inspect.StructType):
            if node.cls in seen:
                continue
            seen.add(node.cls)
            yield node.cls
            waiting += [field.type for field in node.fields]
        elif isinstance(node, inspect.UnionType):
            waiting += node.types
        elif isinstance(node, inspect.ListType):
            waiting.append(node.item_type)
        elif isinstance(node, inspect.DictType):
            waiting.append(node.value_type)


def _always_written(struct: type[msgspec.Struct]) -> list[str]:
    """The fields that no encoding leaves out; msgspec's own schema tells which ones decoding needs."""
    omits = _config(struct).omit_defaults
    return [
        field.encode_name
        for field in msgspec.structs.fields(struct)
        if field.default is not UNSET and not (omits and not field.required)
    ]


def _config(struct: type[msgspec.Struct]) -> msgspec.structs.StructConfig:
    # Of a generic one with its parameters, that of the class itself.
    origin: type[msgspec.Struct] = get_origin(struct) or struct
    return origin.__struct_config__


def _renamed(node: Any, names: dict[str, str]) -> Any:
    if isinstance(node, list):
        return [_renamed(item, names) for item in node]
    if not isinstance(node, dict):
        return names.get(node, node) if isinstance(node, str) else node
    return {key: _renamed(value, names) for key, value in node.items()}
