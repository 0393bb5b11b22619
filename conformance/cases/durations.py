"""How long each case takes with the reference on a CPU: what shards are balanced by, and nothing else.

`durations.json` holds seconds by case id; `conformance durations REPORT...` makes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources


def durations() -> Mapping[str, float]:
    """Seconds by case id; empty where the package comes without the file, and shards are then balanced by number."""
    file = resources.files("conformance.cases").joinpath("durations.json")
    if not file.is_file():
        return {}
    recorded: Mapping[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return recorded
