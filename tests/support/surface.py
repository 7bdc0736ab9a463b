"""What users see of Catenary, as JSON that names no module of ours: moves inside do not change it.

    make surface   # writes tests/data/surface/*.json anew

A change of one of these files is a change for users: it needs a fragment in changelog.d/. Texts (descriptions
of OpenAPI, help, messages) are not part of it.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import io
import json
import re
import socket
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ForwardRef

from google.protobuf import descriptor_pb2, descriptor_pool

from catenary.config import env_name, flag_name
from catenary.config.parser import default_text, placeholder
from catenary.config.settings import is_boolean
from catenary_apps.migration.markdown import tables_markdown
from services.engine.bucketing import Bucket
from services.engine.bucketing.bucket_file import format_buckets, parse_buckets
from tests.support.e2e_stack import ProcessStack, StackPlan, running_stack
from tests.support.http import call
from tests.support.service_process import clean_environment
from tests.support.tiny_llm import chat_model

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "data" / "surface"
PACKAGES = ("catenary", "catenary_apps", "gateway", "services")
# What a person starts with `python -m`, beside `catenary` itself.
MODULES = ("gateway", "services.router", "services.tokenizer", "services.engine")
MODEL = "tiny"
START_S = 120.0

OURS = re.compile(r"\b(?:catenary\w*|gateway|services)(?:\.\w+)*\.(\w+)\b")
_ADDRESS = re.compile(r"<([^<>]*?)(?: object)? at 0x[0-9a-f]+>")
_VARIABLE = re.compile(r"""["'](CATENARY_[A-Z0-9_]*[A-Z0-9])["']""")
_TEXTS = ("description", "summary")


def options() -> dict[str, Any]:
    """Options of every command and process: flag, variable, YAML key, value and default."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        classes: Mapping[str, Any] = importlib.import_module("generate").PROGRAMS
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return {
        title: {
            flag_name(name): {
                "variable": env_name(cls, name),
                "key": name,
                "value": ("true|false" if is_boolean(field) else placeholder(field)).split("|"),
                "default": default_text(name, field),
            }
            for name, field in cls.model_fields.items()
        }
        for title, cls in classes.items()
    }


def variables() -> dict[str, Any]:
    """Variables that the source names beside those of options, and what is taken over from vLLM."""
    named: set[str] = set()
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        named |= set(_VARIABLE.findall(file.read_text(encoding="utf-8")))
    of_options = {entry["variable"] for rows in options().values() for entry in rows.values()}
    moved: dict[str, str] = {}
    for line in tables_markdown().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0].startswith("`") and len(cells) > 1:
            moved |= {name.strip(" `"): cells[1] for name in cells[0].split(",")}
    return {"named": sorted(named - of_options), "moved": moved}


def commands() -> dict[str, Any]:
    """Subcommands of `catenary`, modules to start with `python -m`, entry points, and exit codes."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    main: Callable[[list[str]], int] = resolve_name(scripts["catenary"])
    _, usage, _ = _run(main, ["--help"])
    names = re.findall(r"^  ([a-z][a-z-]+)  ", usage, re.MULTILINE)
    codes = {
        " ".join(["catenary", *words]): _run(main, words)[0]
        for words in ([], ["--help"], ["--version"], ["help", "up"], ["no-such-command"])
    }
    codes |= {
        f"catenary {name} --no-such-option": _run(main, [name, "--no-such-option"])[0] for name in names
    }
    return {"commands": names, "scripts": sorted(scripts), "modules": list(MODULES), "codes": codes}


def faces() -> dict[str, Any]:
    """Names that `catenary` exports, with the signatures of their public members."""
    catenary = importlib.import_module("catenary")
    found: dict[str, Any] = {"catenary": sorted(catenary.__all__)}
    for name in catenary.__all__:
        value = getattr(catenary, name)
        if inspect.isclass(value):
            found[name] = {"()": signature(value)} | dict(_members(value))
            found |= _unpacked(value, found[name])
    return found


def _unpacked(cls: type[Any], members: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the typed dictionaries that a class's methods take as keywords."""
    names = set(re.findall(r"Unpack\[(\w+)\]", str(members)))
    scope = vars(sys.modules[cls.__module__])
    return {name: {key: str(kind) for key, kind in _fields(scope[name])} for name in sorted(names)}


def _fields(typed: type[Any]) -> Iterator[tuple[str, str]]:
    for key, kind in typed.__annotations__.items():
        yield key, OURS.sub(r"\1", kind.__forward_arg__ if isinstance(kind, ForwardRef) else str(kind))


def bucket_files() -> dict[str, Any]:
    """A bucket file as it is written, and files as they are read."""
    buckets = [Bucket(1, 128, 0), Bucket(1, 128, 4), Bucket(2, 128, 0), Bucket(4, 1, 16), Bucket(8, 1, 16)]
    texts = ["(1, 128, 0)", "# comment\n([1, 2], 1, range(8, 25, 8))  # decode\n", "2, 256, [0, 4]"]
    read = {text: " ".join(str(one) for one in _parsed(text)) for text in texts}
    return {"written": format_buckets(buckets, ["a comment"]).splitlines(), "read": read}


def protos() -> dict[str, Any]:
    """Fields of every message by number, values of enums, methods of services."""
    found: dict[str, Any] = {}
    for file in sorted((ROOT / "protos").rglob("*.proto")):
        path = file.relative_to(ROOT / "protos").as_posix()
        importlib.import_module(path.removesuffix(".proto").replace("/", ".") + "_pb2")
        descriptor = descriptor_pb2.FileDescriptorProto()
        descriptor_pool.Default().FindFileByName(path).CopyToProto(descriptor)
        for message in descriptor.message_type:
            found |= _message(message, f"{descriptor.package}.")
        found |= {f"enum {descriptor.package}.{one.name}": _values(one) for one in descriptor.enum_type}
        for service in descriptor.service:
            found[f"service {descriptor.package}.{service.name}"] = {
                one.name: f"({_stream(one.client_streaming)}{one.input_type})"
                f" -> {_stream(one.server_streaming)}{one.output_type}"
                for one in service.method
            }
    return found


def _message(message: descriptor_pb2.DescriptorProto, inside: str) -> dict[str, Any]:
    name = inside + message.name
    found: dict[str, Any] = {name: {}}
    for field in message.field:
        kind = field.type_name or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
        label = descriptor_pb2.FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
        choice = f" in {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else ""
        found[name][str(field.number)] = f"{label} {kind} {field.name}{choice}"
    for inner in message.nested_type:
        found |= _message(inner, f"{name}.")
    return found | {f"enum {name}.{one.name}": _values(one) for one in message.enum_type}


def _values(kind: descriptor_pb2.EnumDescriptorProto) -> dict[str, int]:
    return {value.name: value.number for value in kind.value}


def _stream(streaming: bool) -> str:
    return "stream " if streaming else ""


async def running(directory: Path) -> dict[str, dict[str, Any]]:
    """Surfaces that a running stack shows: OpenAPI, metrics, the state's tables, exit codes of services."""
    model = chat_model(directory / "model")
    ports = dict(zip(("router", "tokenizer", "engine-0"), _free_ports(3), strict=True))
    engine = ("--model", str(model), "--dtype", "float32", "--device", "cpu", "--kv-cache-gib", "0.01")

    def plan(_: Path) -> StackPlan:
        flags = {name: ("--metrics-port", str(port)) for name, port in ports.items()}
        return StackPlan(
            model_dir=model,
            model=MODEL,
            engine_flags=(*engine, "--device-threads", "1", *flags["engine-0"]),
            router_flags=flags["router"],
            tokenizer_flags=flags["tokenizer"],
            gateway_flags=("--state-dir", str(directory / "state")),
        )

    with running_stack(plan) as stack:
        await stack.ready(timeout_s=START_S)
        await _use(stack)
        document = (await call(stack.address, "GET", "/openapi.json")).json()
        pages = {"gateway": (await call(stack.address, "GET", "/metrics")).body.decode()}
        for name, port in ports.items():
            page = await call(f"http://127.0.0.1:{port}", "GET", "/metrics")
            pages[name.removesuffix("-0")] = page.body.decode()
        stack.stop()
    document["info"].pop("version", None)
    return {
        "openapi": with_plain_names(without_texts(document)),
        "metrics": {name: families(page) for name, page in pages.items()},
        "state": dict(_tables(directory / "state")),
        "services": _codes_of_services(),
    }


async def _use(stack: ProcessStack) -> None:
    """Requests of several kinds, so that counters have labels; the first sampled, streamed, stored."""
    message = {"role": "user", "content": "Hello"}
    chat = {"model": MODEL, "messages": [message], "max_tokens": 4}
    bodies = {
        "/v1/chat/completions": [chat, {**chat, "stream": True}, {**chat, "max_tokens": -1}],
        "/v1/completions": [{"model": MODEL, "prompt": "Hello", "max_tokens": 4}],
        "/v1/responses": [{"model": MODEL, "input": "Hello", "max_output_tokens": 16}],
    }
    for path, sent in bodies.items():
        for body in sent:
            await call(stack.address, "POST", path, body, timeout_s=60)
    await call(stack.address, "GET", "/v1/files")
    await stack.idle(timeout_s=60)


def families(page: str) -> dict[str, Any]:
    """Type of each family of a metrics page, and the labels that samples of it were seen with."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, told in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", page, re.MULTILINE):
        family = re.sub(r"_(?:bucket|sum|count|created)$", "", name)
        owner = next((one for one in (name, family) if one in labels), None)
        if owner is not None:
            labels[owner] |= set(re.findall(r'(\w+)="', told))
    return {
        name: {"type": kind, "labels": sorted(labels[name])}
        for name, kind in sorted(kinds.items())
        if not name.startswith(("process_", "python_")) and not name.endswith("_created")
    }


def without_texts(value: Any, inside: str = "") -> Any:
    """A JSON document without its descriptions. `inside`: the key under which the value stands."""
    if isinstance(value, list):
        return [without_texts(item) for item in value]
    if not isinstance(value, dict):
        return value
    # A field of a schema may be called `description` itself.
    texts = () if inside == "properties" else _TEXTS
    return {key: without_texts(item, key) for key, item in value.items() if key not in texts}


def in_process() -> dict[str, Callable[[], dict[str, Any]]]:
    """Surfaces that need nothing running, by the name of their file."""
    return {
        "options": options,
        "variables": variables,
        "commands": commands,
        "faces": faces,
        "bucket_files": bucket_files,
        "protos": protos,
    }


def text_of(surface: Any) -> str:
    """A surface as its file holds it."""
    return json.dumps(surface, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def stored(name: str) -> Any:
    """A surface as it is stored."""
    return json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"))


def difference(name: str, found: Any) -> str:
    """A readable difference to what is stored; empty if there is none."""
    before, after = text_of(stored(name)).splitlines(), text_of(found).splitlines()
    lines = list(difflib.unified_diff(before, after, "stored", "this tree", lineterm="", n=4))
    if not lines:
        return ""
    told = (
        f"tests/data/surface/{name}.json differs: a change for users, which a fragment in changelog.d/ tells"
    )
    return "\n".join([told, "(make surface writes the files anew)", *lines])


def seen_alike(before: Any, after: Any) -> Any:
    """The families found, with stored labels where one of the two saw no sample of a family."""
    alike: dict[str, Any] = {}
    for process, found in after.items():
        then = before.get(process, {})
        alike[process] = {
            name: {**entry, "labels": then[name]["labels"]}
            if name in then and not (entry["labels"] and then[name]["labels"])
            else entry
            for name, entry in found.items()
        }
    return alike


def with_plain_names(document: dict[str, Any]) -> dict[str, Any]:
    """A document whose schemas are not called by the modules of ours that they come from.

    Of two of one name, as pydantic tells apart by their modules, the one whose text comes first is the first.
    """
    schemas: dict[str, Any] = document["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for name in schemas:
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    plain: dict[str, str] = {}
    for short, names in groups.items():
        names.sort(key=lambda name: OURS.sub(r"\1", json.dumps(schemas[name], sort_keys=True)))
        plain |= {name: f"{short}-{place}" if place else short for place, name in enumerate(names)}
    text = json.dumps({**document, "components": {**document["components"], "schemas": {}}})
    renamed = {plain[name]: schema for name, schema in schemas.items()}
    found: dict[str, Any] = json.loads(_renamed(text, plain))
    found["components"]["schemas"] = json.loads(_renamed(json.dumps(renamed), plain))
    return found


def _renamed(text: str, plain: Mapping[str, str]) -> str:
    reference = re.compile(r'"#/components/schemas/([^"]+)"')
    text = reference.sub(lambda found: f'"#/components/schemas/{plain[found[1]]}"', text)
    # Titles of generic schemas name modules too.
    return OURS.sub(r"\1", text)


def signature(value: Any) -> list[str]:
    """Parameters, one a line, and what is returned; a method's self is left out."""
    signature = inspect.signature(value)
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    lines: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not {"*"} & {line[:1] for line in lines}:
            lines.append("*")
        if name != "self":
            told = f"{marks.get(parameter.kind, '')}{name}: {_annotation(parameter.annotation)}"
            empty = parameter.default is inspect.Parameter.empty
            lines.append(told if empty else f"{told} = {parameter.default!r}")
    lines.append(f"-> {_annotation(signature.return_annotation)}")
    return [_ADDRESS.sub(r"<\1>", OURS.sub(r"\1", line)) for line in lines]


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _members(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, value in inspect.getmembers_static(cls):
        if name.startswith("_") and name not in ("__enter__", "__aenter__", "__await__"):
            continue
        if cls.__mro__[-1] is object and hasattr(object, name):
            continue
        inner = getattr(value, "__func__", value)
        if isinstance(value, property):
            yield name, "property"
        elif inspect.isroutine(inner):
            coroutine = inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)
            yield name, [*(["async"] if coroutine else []), *signature(inner)]
        else:
            yield name, "attribute"


def _run(main: Callable[[list[str]], int], words: list[str]) -> tuple[int | str | None, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    return code or 0, out.getvalue(), err.getvalue()


def _parsed(text: str) -> Iterator[tuple[int, int, int]]:
    yield from ((one.batch, one.query, one.context_blocks) for one in parse_buckets(text))


def _codes_of_services() -> dict[str, int]:
    commands = {f"python -m {module} {flag}": (module, flag) for module in MODULES for flag in _FLAGS}
    started = {
        told: subprocess.Popen(
            (sys.executable, "-m", module, flag),
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for told, (module, flag) in commands.items()
    }
    return {told: process.wait(60) for told, process in started.items()}


_FLAGS = ("--help", "--no-such-option")


def _tables(directory: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(directory.rglob("*")):
        if not file.is_file() or not file.read_bytes().startswith(b"SQLite format 3\0"):
            continue
        with closing(sqlite3.connect(file)) as database:
            rows = database.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
            tables = {name: " ".join(sql.split()) for name, sql in rows}
            (version,) = database.execute("PRAGMA user_version").fetchone()
        yield file.relative_to(directory).as_posix(), {"version": version, "tables": tables}


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def main(directory: Path) -> None:
    """Write all surfaces anew."""
    STORED.mkdir(parents=True, exist_ok=True)
    found = {name: make() for name, make in in_process().items()} | asyncio.run(running(directory))
    for name, surface in found.items():
        (STORED / f"{name}.json").write_text(text_of(surface), encoding="utf-8")
        print(f"wrote {STORED / name}.json")  # noqa: T201


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory(prefix="cat-", ignore_cleanup_errors=True) as scratch:
        main(Path(scratch))
