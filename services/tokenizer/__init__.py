"""The tokenizer service: text to token ids and back."""

from __future__ import annotations

import os

# The service spawns workers while gRPC runs. They are executed anew, so gRPC's fork handlers have nothing to
# do; if they are on, each spawn writes a line on the terminal. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
