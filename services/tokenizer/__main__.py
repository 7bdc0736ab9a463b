"""`python -m services.tokenizer`: run the tokenizer service."""

from __future__ import annotations

import catenary.grpc_environment  # noqa: F401
from catenary.config import load
from catenary.runtime import run
from services.tokenizer.app import serve
from services.tokenizer.config import TokenizerConfig

if __name__ == "__main__":
    config = load(TokenizerConfig, None, prog="tokenizer")
    run(lambda stop: serve(config, stop))
