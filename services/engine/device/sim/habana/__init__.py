"""A package `habana_frameworks` with the part of the vendor's that the engine uses.

Each module here is the one of that name in gaudi-facts.md section 4. `services.engine.device.sim.install`
puts them where `import habana_frameworks` finds them.
"""

from __future__ import annotations
