"""A worker process: reads tasks from its link, renders, answers. It holds no secret, opens no connection."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import socket
import sys
import threading
from dataclasses import dataclass

import msgspec

from services.tokenizer.rendering import ModelFilesError, PairRenderer, Renderer, RenderRefused
from services.tokenizer.workers.constraints import ConstraintChecker
from services.tokenizer.workers.frames import BlockingFrames, LinkClosed
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
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
)


def main() -> int:
    """Serve until the link ends."""
    parser = argparse.ArgumentParser(description="Worker of the tokenizer service; started by it.")
    parser.add_argument("--link-fd", type=int, required=True)
    options = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    frames = BlockingFrames(socket.socket(fileno=options.link_fd))
    try:
        setup = msgspec.msgpack.decode(frames.receive(), type=WorkerSetup)
        tools = _load(setup, frames)
        return 1 if tools is None else _serve(tools, frames)
    except LinkClosed:
        return 0


def _end_with_parent() -> None:
    # The service holds the other end of stdin: however it dies, this returns, even while a task runs.
    os.read(0, 1)
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _Tools:
    """What tasks are done with."""

    renderer: Renderer
    pairs: PairRenderer
    checker: ConstraintChecker


def _load(setup: WorkerSetup, frames: BlockingFrames) -> _Tools | None:
    if setup.memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    try:
        renderer = Renderer(
            setup.files,
            max_rendered_chars=setup.max_rendered_chars,
            max_answer_tokens=setup.max_answer_tokens,
            json_limits=setup.json_limits,
            request_templates=setup.request_templates,
        )
    except ModelFilesError as error:
        frames.send(msgspec.msgpack.encode(WorkerFailed(str(error))))
        return None
    pairs = PairRenderer(
        renderer, instruction=setup.pair_instruction, max_answer_tokens=setup.max_answer_tokens
    )
    ready = WorkerReady(
        special_token_ids=list(renderer.vocabulary.special_ids),
        max_token_id=renderer.vocabulary.max_id,
        has_chat_template=renderer.has_chat_template,
        template_variables=list(renderer.template_variables),
        renders_pairs=pairs.available,
    )
    frames.send(msgspec.msgpack.encode(ready))
    memory = setup.constraint_memory_bytes
    return _Tools(renderer, pairs, ConstraintChecker(setup.files.tokenizer_json, memory_bytes=memory))


def _serve(tools: _Tools, frames: BlockingFrames) -> int:
    decoder = msgspec.msgpack.Decoder(Task)
    encoder = msgspec.msgpack.Encoder()
    gc.collect()
    gc.freeze()
    while True:
        task = decoder.decode(frames.receive())
        frames.send(encoder.encode(_answer(tools, task)))


def _answer(tools: _Tools, task: Task) -> Answer:
    try:
        return _perform(tools, task)
    except RenderRefused as refused:
        return Refused(refused.code, refused.message, refused.param)
    except Exception as error:
        return Broken(type(error).__name__)


def _perform(tools: _Tools, task: Task) -> Answer:
    renderer = tools.renderer
    match task:
        case ChatTask(turns, options, limits):
            chat = renderer.chat(turns, options, limits)
            return TokenLists([chat.ids], [chat.tail])
        case CompletionTask(prompts, add_special_tokens, limits):
            return TokenLists(
                renderer.completion(prompts, add_special_tokens=add_special_tokens, limits=limits)
            )
        case PairTask(pairs, limits):
            rendered = tools.pairs.render(pairs, limits)
            starts = [pair.second_start for pair in rendered]
            return TokenLists([pair.ids for pair in rendered], second_starts=starts)
        case TokenizeTask(text, add_special_tokens):
            return TokenLists([renderer.tokenize(text, add_special_tokens=add_special_tokens)])
        case DetokenizeTask(token_ids, skip_special_tokens):
            return Text(renderer.detokenize(token_ids, skip_special_tokens=skip_special_tokens))
        case ConstraintTask(kind, source, param):
            tools.checker.check(kind, source, param)
            return Compiled()


if __name__ == "__main__":
    sys.exit(main())
