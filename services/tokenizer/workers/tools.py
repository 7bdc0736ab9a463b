"""Do the tasks of a worker: a model's renderers and its constraint checker, loaded once. No processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llguidance import LLTokenizer

from catenary.constraints import (
    ConstraintError,
    ConstraintKind,
    check_grammar,
    control_tokens,
    to_llguidance,
)
from catenary.memory import bounded_memory
from services.tokenizer.rendering import PairRenderer, RefusalCode, Renderer, RenderRefused
from services.tokenizer.workers.messages import (
    Answer,
    Broken,
    ChatTask,
    Compiled,
    CompletionTask,
    ConstraintTask,
    DetokenizeTask,
    PairTask,
    Refused,
    Task,
    Text,
    TokenizeTask,
    TokenLists,
    WorkerReady,
    WorkerSetup,
)


class ConstraintChecker:
    """Compiles constraints against one model's vocabulary.

    The caller limits the time, by killing the process: a compilation cannot be interrupted. The vocabulary,
    which takes up to seconds, is therefore read at once.
    """

    def __init__(self, tokenizer_json: bytes, *, memory_bytes: int) -> None:
        """`memory_bytes`: what compiling one constraint may take; beyond that the process aborts."""
        self._memory_bytes = memory_bytes
        self._vocabulary = _read(tokenizer_json)

    def check(self, kind: int, source: str, param: str, *, closed: bool = False) -> None:
        """Raise RenderRefused with `param`: INVALID_ARGUMENT, or UNSUPPORTED whatever the constraint."""
        if self._vocabulary is None:
            message = "The output of this model cannot be constrained."
            raise RenderRefused(message, param=param, code=RefusalCode.UNSUPPORTED)
        tokenizer, control = self._vocabulary
        try:
            with bounded_memory(self._memory_bytes):
                grammar = to_llguidance(ConstraintKind(kind), source, control=control, closed=closed)
                check_grammar(grammar, tokenizer)
        except ConstraintError as error:
            raise RenderRefused(str(error), param=param) from None
        except MemoryError:
            raise RenderRefused("The constraint needs too much memory.", param=param) from None


def _read(tokenizer_json: bytes) -> tuple[LLTokenizer, dict[str, int]] | None:
    """Return the vocabulary; None for a tokenizer whose tokens are no bytes of text, such as BERT's."""
    try:
        tokenizer = LLTokenizer(tokenizer_json.decode())
        return tokenizer, control_tokens(tokenizer_json, tokenizer)
    except ValueError:
        return None
    except BaseException as error:
        # A panic in Rust is no Exception. The service can do without constraints.
        if type(error).__name__ != "PanicException":
            raise
        return None


A = TypeVar("A")


class TaskTools:
    """Does tasks for one model. Raises ModelFilesError if its files cannot be used."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.renderer = Renderer(
            setup.files,
            max_rendered_chars=setup.max_rendered_chars,
            max_answer_tokens=setup.max_answer_tokens,
            max_seconds=setup.max_seconds,
            json_limits=setup.json_limits,
            request_templates=setup.request_templates,
        )
        self._pairs = PairRenderer(
            self.renderer, instruction=setup.pair_instruction, max_answer_tokens=setup.max_answer_tokens
        )
        self._checker = ConstraintChecker(
            setup.files.tokenizer_json, memory_bytes=setup.constraint_memory_bytes
        )

    @property
    def ready(self) -> WorkerReady:
        """The facts that were found in the files."""
        return WorkerReady(
            special_token_ids=list(self.renderer.vocabulary.special_ids),
            max_token_id=self.renderer.vocabulary.max_id,
            has_chat_template=self.renderer.has_chat_template,
            template_variables=list(self.renderer.template_variables),
            renders_pairs=self._pairs.available,
            reads_tools=self.renderer.reads_tools,
            parsers=self.renderer.parsers,
        )

    def answer(self, task: Task) -> Answer:
        """Do a task; a defect is an answer too."""
        return answer_of(lambda: self._perform(task))

    def _perform(self, task: Task) -> Answer:
        renderer = self.renderer
        match task:
            case ChatTask(turns, options, limits):
                chat = renderer.chat(turns, options, limits)
                return TokenLists([chat.ids], [chat.tail])
            case CompletionTask(prompts, add_special_tokens, limits):
                return TokenLists(
                    renderer.completion(prompts, add_special_tokens=add_special_tokens, limits=limits)
                )
            case PairTask(pairs, limits):
                rendered = self._pairs.render(pairs, limits)
                starts = [pair.second_start for pair in rendered]
                return TokenLists([pair.ids for pair in rendered], second_starts=starts)
            case TokenizeTask(text, add_special_tokens):
                return TokenLists([renderer.tokenize(text, add_special_tokens=add_special_tokens)])
            case DetokenizeTask(token_ids, skip_special_tokens):
                return Text(renderer.detokenize(token_ids, skip_special_tokens=skip_special_tokens))
            case ConstraintTask(kind, source, param, closed):
                self._checker.check(kind, source, param, closed=closed)
                return Compiled()


def answer_of(work: Callable[[], A]) -> A | Refused | Broken:
    """Return the answer of `work`, or how it failed."""
    try:
        return work()
    except RenderRefused as refused:
        return Refused(refused.code, refused.message, refused.param)
    except Exception as error:
        return Broken(type(error).__name__)
