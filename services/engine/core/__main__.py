"""`python -m services.engine.core --link-fd N`: started by the servicer, driven over the inherited socket."""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from services.engine.core.process import serve
from services.engine.link import BlockingLink


def main() -> int:
    """Run the core on the link of the command line."""
    parser = argparse.ArgumentParser(prog="python -m services.engine.core", description=__doc__)
    parser.add_argument("--link-fd", type=int, required=True, help="descriptor of the connected socket")
    options = parser.parse_args()
    # Ctrl-C reaches the whole process group; the servicer drains and then stops the core over the link.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sock = socket.socket(fileno=options.link_fd)
    except OSError as error:
        parser.error(f"--link-fd {options.link_fd} is not a socket: {error.strerror}")
    return serve(BlockingLink(sock))


if __name__ == "__main__":
    sys.exit(main())
