"""Read the files of a Hugging Face model directory that the service needs; the errors of rendering."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec


class RefusalCode(StrEnum):
    """The error codes of the contract that rendering can give, by their name there without the prefix."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNSUPPORTED = "UNSUPPORTED"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"


class RenderRefused(Exception):
    """The input cannot be rendered. `message` is for the caller; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str, code: RefusalCode = RefusalCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ModelFilesError(Exception):
    """A model directory cannot be served. The text is one line for the operator; it may name paths."""


# Of files of the model's directory, which the operator chose: published tokenizers have tens of megabytes.
MAX_FILE_BYTES = 512 * 1024 * 1024
MAX_NAMED_TEMPLATES = 64
MAX_RESPONSE_TEMPLATE = 65_536
DEFAULT_TEMPLATE = "default"


class ModelFiles(msgspec.Struct, frozen=True):
    """A model's tokenizer, as read. Workers get this over their link, so all of them serve the same bytes."""

    tokenizer_json: bytes
    # Jinja source; None: the model has no chat template.
    chat_template: str | None
    # Template variables: bos_token, eos_token and so on.
    special_tokens: dict[str, str]
    # add_bos_token of the configuration; None: as tokenizer.json says.
    add_bos: bool | None
    # Further templates, such as the one for chats with tools (tool_use).
    named_templates: dict[str, str] = {}
    # transformers' declarative description of the model's answers, as JSON; empty: there is none.
    response_template: str = ""

    @property
    def templates(self) -> dict[str, str]:
        """All templates by name; the usual one is `default`."""
        own = {} if self.chat_template is None else {DEFAULT_TEMPLATE: self.chat_template}
        return self.named_templates | own


def read_model_files(directory: Path, *, chat_template: Path | None = None) -> ModelFiles:
    """Read `directory`. `chat_template` is a file that replaces the model's own template.

    Raises ModelFilesError with one line that says what is wrong and what to do.
    """
    if not directory.is_dir():
        raise ModelFilesError(f"the model directory {directory} does not exist")
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelFilesError(f"{directory} has no tokenizer.json; {_advice(directory)}")
    config = _read_object(directory / "tokenizer_config.json")
    templates = _own_templates(directory, config)
    if chat_template is not None:
        templates = {DEFAULT_TEMPLATE: _read_text(chat_template)}
    add_bos = config.get("add_bos_token")
    return ModelFiles(
        tokenizer_json=_read(path),
        chat_template=templates.pop(DEFAULT_TEMPLATE, None),
        special_tokens=_special_tokens(_read_object(directory / "special_tokens_map.json") | config),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        named_templates=templates,
        response_template=_response_template(config),
    )


def _response_template(config: dict[str, Any]) -> str:
    template = config.get("response_template")
    text = json.dumps(template, ensure_ascii=False) if isinstance(template, dict) else ""
    return text if len(text) <= MAX_RESPONSE_TEMPLATE else ""


def _advice(directory: Path) -> str:
    has_weights = any(directory.glob("*.gguf"))
    if has_weights:
        return "convert the GGUF file once with `python -m services.engine.model.prepare --model FILE`"
    return (
        "make it from the other formats with transformers: "
        "`AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)`"
    )


def _own_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name. The newest place wins, as in transformers: files of their own, then the
    configurations."""
    files = {DEFAULT_TEMPLATE: directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if len(files) > MAX_NAMED_TEMPLATES:
        raise ModelFilesError(f"{directory} has more than {MAX_NAMED_TEMPLATES} chat templates")
    found = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    for source in (_read_object(directory / "chat_template.json"), config):
        found = found or _templates_in(source.get("chat_template"))
    return found


def _templates_in(value: Any) -> dict[str, str]:
    """Return the templates of a configuration, which holds one, or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    named = [(entry.get("name"), entry.get("template")) for entry in entries[:MAX_NAMED_TEMPLATES]]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    entries = {**config, **extra} if isinstance(extra, dict) else config
    tokens: dict[str, str] = {}
    for name, value in entries.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelFilesError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}") from None


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        raise ModelFilesError(f"{path} is not UTF-8 text") from None


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError):
        raise ModelFilesError(f"{path} is not valid JSON") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object")
    return value
