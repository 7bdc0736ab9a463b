"""Talk to Catenary over gRPC with its own client: text and token ids, streams, vectors.

    python examples/python_client.py --secret-file FILE [QUESTION]

`catenary up` prints the two addresses and the file of the secret; with Compose it is deploy/secrets/client.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from catenary import Client
from catenary.rpc import RpcError
from catenary.v1 import common_pb2


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a question over gRPC.")
    parser.add_argument("question", nargs="?", default="Name the capital of France.")
    parser.add_argument("--router", default="127.0.0.1:7070")
    parser.add_argument("--tokenizer", default="127.0.0.1:7071", help="that of the model")
    parser.add_argument("--secret-file", type=Path, required=True, help="file with the client secret")
    options = parser.parse_args()

    secret = options.secret_file.read_text(encoding="utf-8").strip()
    with Client(options.router, tokenizer=options.tokenizer, secret=secret) as client:
        served = [model.info for model in client.models()]
        model = next(info.name for info in served if common_pb2.MODEL_TASK_EMBED not in info.tasks)
        question = [{"role": "user", "content": options.question}]

        answer = client.chat(question, model=model, temperature=0, max_tokens=64)
        print(answer.text)
        usage = answer.usage
        print(f"[{answer.finish_reason}: {usage.prompt_tokens} + {usage.completion_tokens} tokens]")
        for piece in client.stream_chat(question, model=model, temperature=0, max_tokens=64):
            print(piece.text, end="", flush=True)
        print()
        print(client.tokenize("The capital of France is", model=model))


if __name__ == "__main__":
    try:
        main()
    except (RpcError, OSError) as error:
        sys.exit(str(error))
