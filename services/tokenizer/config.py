"""Options of the tokenizer service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from catenary.config import Expert, settings
from catenary.parsers import ReasoningParser, ToolParser
from catenary.rpc import RpcConfig
from catenary.sequence_limits import MAX_CONSTRAINT_BYTES
from services.tokenizer.rendering import DEFAULT_INSTRUCTION


class TokenizerConfig(RpcConfig):
    """Flags, CATENARY_TOKENIZER_ variables or YAML."""

    model_config = settings("CATENARY_TOKENIZER_")

    headings: ClassVar[Mapping[str, str]] = {
        "listen": "gRPC: addresses, secrets, TLS",
        "model_dir": "Model",
        "workers": "Workers",
        "max_text_bytes": Expert("Limits of requests"),
        "max_constraint_bytes": "Structured output",
    }

    listen: tuple[str, ...] = Field(
        ("127.0.0.1:7071",),
        min_length=1,
        max_length=16,
        description="Addresses to listen on: HOST:PORT, [IPV6]:PORT or unix:/PATH; port 0 takes a free one.",
    )
    max_calls: int = Field(
        320,
        ge=1,
        le=1_000_000,
        description="Concurrent calls, and renders on streams with them; more are refused unread.",
    )
    model_dir: Path = Field(description="Hugging Face model directory; it must hold a tokenizer.json.")
    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="Name that requests use; default: the directory's."
    )
    chat_template: Path | None = Field(
        None, description="File with a Jinja chat template that replaces the model's own."
    )
    tool_parser: ToolParser | None = Field(
        None,
        description="How the model writes tool calls; none: they are text. Default: told by its template.",
    )
    reasoning_parser: ReasoningParser | None = Field(
        None, description="How it marks reasoning; none: that is text. Default: told by its template."
    )
    pair_instruction: str = Field(
        DEFAULT_INSTRUCTION,
        max_length=4096,
        description="What a chat model is told to look for when it judges a query with a document.",
    )
    workers: int = Field(
        2,
        ge=1,
        le=256,
        description="Worker processes that render and tokenize. Of two or more, one takes no long task.",
    )
    short_text_kib: int = Field(
        64,
        ge=1,
        le=1 << 20,
        description="KiB of text beyond which a request is a long task, as every constraint is.",
    )
    small_chat_bytes: int = Field(
        1024,
        ge=0,
        le=16_384,
        description="UTF-8 bytes up to which a chat of plain messages is rendered in the service itself, if "
        "the model's template can do nothing that takes long; 0: workers render all.",
    )
    worker_memory_mib: int = Field(
        4096, ge=0, le=1 << 20, description="Address space of a worker, in MiB; 0: no limit."
    )
    task_timeout_s: float = Field(
        10, gt=0, le=600, description="Seconds that one request may compute; then its worker is replaced."
    )
    start_timeout_s: float = Field(
        60, gt=0, le=3600, description="Seconds in which a worker must have loaded the model's files."
    )
    queue_size: int = Field(
        256,
        ge=0,
        le=65536,
        description="Requests that may wait for a worker. Of more, the tenant with the most loses its last.",
    )
    queue_mib: int = Field(256, ge=1, le=65536, description="Text of waiting requests together, in MiB.")
    queue_timeout_s: float = Field(
        15,
        gt=0,
        le=600,
        description="Seconds that a request may wait; with task-timeout-s less than the gateway waits.",
    )
    retry_after_ms: int = Field(
        1000, ge=1, le=3_600_000, description="Milliseconds after which a refused request may be tried again."
    )
    max_text_bytes: int = Field(
        16 * 1024 * 1024, ge=1, le=1 << 30, description="UTF-8 bytes of all texts of a request."
    )
    max_rendered_chars: int = Field(
        32 * 1024 * 1024, ge=1, le=1 << 30, description="Characters that a chat template may write."
    )
    max_messages: int = Field(4096, ge=1, le=1 << 20, description="Messages of a chat.")
    max_content_parts: int = Field(16_384, ge=1, le=1 << 22, description="Content parts of a chat together.")
    max_prompts: int = Field(256, ge=1, le=65536, description="Prompts of a completion request.")
    max_answer_tokens: int = Field(
        1_048_576, ge=1, le=1 << 24, description="Token ids that all texts of a request may come to."
    )
    max_tool_calls: int = Field(16_384, ge=0, le=1 << 22, description="Tool calls of a chat together.")
    max_json_depth: int = Field(
        64, ge=1, le=256, description="Nesting of tools, documents, template variables and call arguments."
    )
    max_json_values: int = Field(
        200_000, ge=1, le=1 << 24, description="Values in each of those, the inner ones counted too."
    )
    allow_request_templates: bool = Field(
        False,
        description="Take chat templates from requests: code of callers, run in a sandbox under limits.",
    )
    max_template_kib: int = Field(64, ge=1, le=16_384, description="Source of such a template, in KiB.")
    template_timeout_s: float = Field(
        1, gt=0, le=600, description="Seconds that such a template may compile, and may render."
    )
    template_memory_mib: int = Field(
        256, ge=16, le=65_536, description="Memory that such a template may take, in MiB."
    )
    max_constraint_bytes: int = Field(
        MAX_CONSTRAINT_BYTES,
        ge=1,
        le=MAX_CONSTRAINT_BYTES,
        description="UTF-8 bytes of a schema, regular expression or grammar.",
    )
    constraint_timeout_s: float = Field(
        5, gt=0, le=600, description="Seconds that a constraint may compile; then its worker is replaced."
    )
    constraint_memory_mib: int = Field(
        512, ge=1, le=65_536, description="Memory that compiling a constraint may take, in MiB."
    )
    constraint_cache: int = Field(
        4096, ge=1, le=1 << 20, description="Constraints whose verdict is remembered, about 200 bytes each."
    )
    max_token_ids: int = Field(262_144, ge=1, le=1 << 24, description="Token ids of a Detokenize request.")

    @property
    def model_name(self) -> str:
        """Name that requests use."""
        return self.served_model_name or self.model_dir.resolve().name
