"""Set the environment variables that gRPC's C-core reads, in a process of ours.

Our programs import this module before grpc, which reads the variables when it is imported. `catenary` itself
does not: the environment of a program that uses the client is that program's own. A variable that is set
already stays.
"""

from __future__ import annotations

import os

# At the default level each GOAWAY of an ordered shutdown is written to stderr, past the logs.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Processes are spawned and never forked, so its fork handlers have nothing to do but to write a line each.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its event engine reads sockets in threads of its own and hands each message to the thread that waits for it.
# Without it that thread reads by itself, which takes about a seventh of the time off a message. To have the
# event engine back, set the variable, if only to nothing.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
