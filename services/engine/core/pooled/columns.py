"""What became of documents, as the columns of one message."""

from __future__ import annotations

from services.engine.core.pooled.queue import Document
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import EndRow, StepColumns


class DocumentColumns:
    """Collects ends; a document has no other rows."""

    def __init__(self) -> None:
        self._columns = StepColumns([], [], [], [], [], [], [], [], [])

    def __bool__(self) -> bool:
        return bool(self._columns.keys)

    def add(
        self,
        document: Document,
        tokens: int,
        reason: FinishReason,
        *,
        vector: bytes | None = None,
        code: CoreErrorCode | None = None,
        message: str | None = None,
    ) -> None:
        """The end of a document that had `tokens` tokens."""
        columns = self._columns
        columns.keys.append(document.key)
        columns.token_counts.append(0)
        columns.ends.append(
            EndRow(
                row=len(columns.keys) - 1,
                reason=reason,
                prompt_tokens=tokens,
                cached_tokens=0,
                completion_tokens=0,
                error_code=code,
                error_message=message,
                vector=vector,
            )
        )

    def take(self) -> StepColumns:
        """Returns the columns and starts the next ones."""
        columns, self._columns = self._columns, StepColumns([], [], [], [], [], [], [], [], [])
        return columns
