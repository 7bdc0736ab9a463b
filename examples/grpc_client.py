"""Talk to Catenary over plain gRPC: token ids in, token ids out.

    python examples/grpc_client.py --secret-file FILE [QUESTION]

`catenary up` prints the two addresses and the file of the secret; with Compose it is deploy/secrets/client.
Only grpcio and the stubs of protos/ are used, so that this can be written in any language that has gRPC.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc

from catenary.v1 import common_pb2, router_pb2, router_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask a question over gRPC.")
    parser.add_argument("question", nargs="?", default="Name the capital of France.")
    parser.add_argument("--router", default="127.0.0.1:7070")
    parser.add_argument("--tokenizer", default="127.0.0.1:7071")
    parser.add_argument("--secret-file", type=Path, required=True, help="file with the client secret")
    parser.add_argument(
        "--ca-file", type=Path, help="authorities of the services' certificates: turns TLS on"
    )
    parser.add_argument("--model", help="the first that is served, unless given")
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


def open_channel(target: str, ca_file: Path | None) -> grpc.Channel:
    if ca_file is None:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca_file.read_bytes()))


def main() -> None:
    options = parse_options()
    secret = options.secret_file.read_text(encoding="utf-8").strip()
    metadata = (("authorization", f"Bearer {secret}"),)
    with (
        open_channel(options.router, options.ca_file) as to_router,
        open_channel(options.tokenizer, options.ca_file) as to_text,
    ):
        router = router_pb2_grpc.RouterServiceStub(to_router)
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(to_text)

        served = router.ListModels(router_pb2.ListModelsRequest(), metadata=metadata, timeout=10).models
        others = {common_pb2.MODEL_TASK_EMBED, common_pb2.MODEL_TASK_SCORE, common_pb2.MODEL_TASK_CLASSIFY}
        chats = [model.info.name for model in served if not others.intersection(model.info.tasks)]
        if not options.model and not chats:
            raise SystemExit("no engine has attached yet")
        model = options.model or chats[0]

        # Text becomes token ids in the tokenizer service, with the model's chat template.
        message = tokenizer_pb2.ChatMessage(
            role="user", content=[tokenizer_pb2.ContentPart(text=options.question)]
        )
        rendered = tokenizer.Render(
            tokenizer_pb2.RenderRequest(model=model, chat=tokenizer_pb2.ChatInput(messages=[message])),
            metadata=metadata,
            timeout=30,
        )

        # One sequence. An absent field takes the model's default; cancelling the call aborts the sequence.
        spec = common_pb2.SequenceSpec(
            model=model,
            token_ids=rendered.prompts[0].token_ids,
            sampling=common_pb2.SamplingParams(temperature=0),
            stopping=common_pb2.StoppingParams(max_tokens=options.max_tokens),
        )
        generated: list[int] = []
        for delta in router.Generate(router_pb2.GenerateRequest(spec=spec), metadata=metadata):
            generated += delta.token_ids
            if delta.HasField("end"):
                reason = common_pb2.FinishReason.Name(delta.end.reason)
                usage = delta.end.usage
                print(f"[{reason}: {usage.prompt_tokens} + {usage.completion_tokens} tokens]")

        answer = tokenizer.Detokenize(
            tokenizer_pb2.DetokenizeRequest(model=model, token_ids=generated, skip_special_tokens=True),
            metadata=metadata,
            timeout=30,
        )
        print(answer.text)


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        # The error of a call is the call, too, which has a code and a text.
        sys.exit(f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error))
    except OSError as error:
        sys.exit(str(error))
