"""What the tests record: the stand-in, by its own declarations."""

from __future__ import annotations

from pathlib import Path

from conformance.recording.record import RecordOptions

HERE = Path(__file__).parent
STANDIN = HERE / "standin"
DECLARATIONS = HERE / "small.toml"


def options(out: Path, checkout: Path = STANDIN, scenarios: Path = DECLARATIONS) -> RecordOptions:
    return RecordOptions(checkout, out, "reference", agreed=True, scenarios=scenarios, revision="stand-in")
