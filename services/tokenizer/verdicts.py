"""Checks of constraints: one verdict for each, remembered, whatever it does to the worker."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from catenary.constraints import ConstraintKind
from catenary.rpc import RpcError, refuse
from catenary.schema import MAX_CONSTRAINT_AFTER
from catenary.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.execution import ERROR_CODES, TaskRunner
from services.tokenizer.requests import SizedTask, checked_tenant
from services.tokenizer.workers import ConstraintTask, Refused, TaskCrashed, TaskTimeout

_DEFAULT_PARAM = "constraint"
_KINDS = frozenset(int(kind) for kind in ConstraintKind)
# A constraint that killed its worker may have been unlucky.
_SUSPECT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Verdict:
    """None: it can be honoured. `expires`: by the monotonic clock."""

    refusal: tuple[common_pb2.ErrorCode.ValueType, str] | None
    expires: float = float("inf")


class ConstraintVerdicts:
    """Has constraints compiled by the workers, for which they are long tasks."""

    def __init__(
        self, config: TokenizerConfig, runner: TaskRunner, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._runner = runner
        self._clock = clock
        self._known: OrderedDict[bytes, _Verdict] = OrderedDict()

    async def check(self, request: tokenizer_pb2.CheckConstraintRequest) -> None:
        """Raises RpcError: INVALID_ARGUMENT or UNSUPPORTED, with the request's `param`, if the constraint
        cannot be honoured; OVERLOADED if there was no place for it in time."""
        constraint, param = request.constraint, request.param or _DEFAULT_PARAM
        self._check_shape(constraint, param)
        key = _key(constraint)
        verdict = self._known.get(key)
        if verdict is None or verdict.expires < self._clock():
            verdict = await self._judge(constraint, param, checked_tenant(request.tenant))
            self._known[key] = verdict
            if len(self._known) > self._config.constraint_cache:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if verdict.refusal is not None:
            code, message = verdict.refusal
            raise refuse(code, message, param=param)

    def _check_shape(self, constraint: common_pb2.Constraint, param: str) -> None:
        if constraint.kind not in _KINDS:
            raise _invalid("The kind of the constraint is not known.", param)
        size, limit = len(constraint.source.encode()), self._config.max_constraint_bytes
        if size > limit:
            raise _invalid(f"The constraint has {size} bytes; at most {limit} are allowed.", param)
        if constraint.HasField("after") and not 1 <= len(constraint.after) <= MAX_CONSTRAINT_AFTER:
            raise _invalid(
                f"The text that a constraint stands behind has 1 to {MAX_CONSTRAINT_AFTER} characters.", param
            )

    async def _judge(self, constraint: common_pb2.Constraint, param: str, tenant: str) -> _Verdict:
        """Retried once on a crash: a worker may die of something else."""
        task = ConstraintTask(constraint.kind, constraint.source, param, constraint.closed_objects)
        sized = SizedTask(task, len(constraint.source), tenant, self._config.constraint_timeout_s, param)
        try:
            for _ in range(2):
                try:
                    answer = await self._runner.attempt("constraint", sized)
                except TaskCrashed:
                    continue
                if isinstance(answer, Refused):
                    return _Verdict((ERROR_CODES[answer.code], answer.message))
                return _Verdict(None)
            return self._suspect("The constraint is too complex to compile.")
        except TaskTimeout:
            limit = self._config.constraint_timeout_s
            return self._suspect(f"The constraint could not be compiled within the limit of {limit:g} s.")

    def _suspect(self, message: str) -> _Verdict:
        return _Verdict((common_pb2.ERROR_CODE_INVALID_ARGUMENT, message), self._clock() + _SUSPECT_S)


def _key(constraint: common_pb2.Constraint) -> bytes:
    form = f"{constraint.kind}:{constraint.closed_objects}:{constraint.source}"
    return hashlib.sha256(form.encode()).digest()


def _invalid(message: str, param: str) -> RpcError:
    return refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message, param=param)
