"""The engine: a model on a device."""

from __future__ import annotations

import os

# Before torch is imported anywhere in an engine: it would load Habana's bridge by itself, which reads the
# environment and checks versions then, before `prepare_environment` and `check_versions` had their turn.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
