"""What to record, read from a TOML file: sets with their configurations, and the scenarios of each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from conformance.config import ModelConfig
from conformance.errors import FixtureError
from conformance.fixtures import TAPS
from conformance.interface import Reading
from conformance.recording.images import DeclaredImage, make_image
from conformance.recording.upstream import RecordingError
from conformance.tensors import one_line

DEFAULT = "recording/scenarios.toml"
LARGEST_SIDE = 1 << 12
"""Positions, and patches of a side: more would only take memory before anything else is checked."""
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_.\-]*")
_FIELDS = {"set", "name", "batch", "prefill", "steps", "reading", "keep", "image", "drafts"}


@dataclass(frozen=True)
class RecordedScenario:
    """One prefill of `prefill` tokens, then `steps` calls of one token, for `batch` sequences."""

    set_name: str
    name: str
    batch: int
    prefill: int
    steps: int
    reading: Reading
    keep: tuple[str, ...] | None
    """Taps to keep beside `input_ids`; None keeps all."""
    image: DeclaredImage | None = None
    """An image inside the prompt, whose span counts among the `prefill` tokens."""
    drafts: bool = False
    """Whether the draft head runs after every call."""


@dataclass(frozen=True)
class Plan:
    """A whole file: seed, configurations by set, scenarios in order."""

    seed: int
    configurations: Mapping[str, Mapping[str, Any]]
    scenarios: tuple[RecordedScenario, ...]
    text: bytes
    """The file, whose hash belongs to the provenance."""


def read_plan(path: Path | None) -> Plan:
    """Read a file of declarations, the shipped one when None.

    Raises:
        RecordingError: not a file of the form that the shipped one shows.
    """
    origin = DEFAULT if path is None else one_line(str(path))
    try:
        text = resources.files("conformance").joinpath(DEFAULT).read_bytes() if path is None else path.read_bytes()
        content = tomllib.loads(text.decode())
    except OSError as error:
        raise RecordingError(f"{origin}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecordingError(f"{origin}: not valid TOML: {one_line(str(error))}") from error
    try:
        configurations = {
            _plain(name, "set"): _with_nulls(declared["configuration"]) for name, declared in content["sets"].items()
        }
        scenarios = tuple(_scenario(fields, configurations) for fields in content["scenarios"])
        if type(content["seed"]) is not int:
            raise RecordingError("seed is not a number")
    except KeyError as error:
        raise RecordingError(f"{origin}: {error.args[0]} is missing") from error
    except (AttributeError, TypeError) as error:
        raise RecordingError(f"{origin}: not of the form of the shipped file: {error}") from error
    except (RecordingError, FixtureError) as error:
        raise RecordingError(f"{origin}: {error}") from error
    identities = [(scenario.set_name, scenario.name) for scenario in scenarios]
    if not scenarios or len(set(identities)) != len(identities):
        raise RecordingError(f"{origin}: no scenario, or two of one name")
    if {scenario.set_name for scenario in scenarios} != set(configurations):
        raise RecordingError(f"{origin}: a set without a scenario")
    return Plan(content["seed"], configurations, scenarios, text)


def _scenario(fields: Mapping[str, Any], configurations: Mapping[str, Mapping[str, Any]]) -> RecordedScenario:
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise RecordingError(f"scenario {fields.get('name')}: unknown key {unknown[0]}")
    name = _plain(fields["name"], "scenario")
    batch, prefill, steps = fields.get("batch", 1), fields["prefill"], fields.get("steps", 0)
    for key, value, least in (("batch", batch, 1), ("prefill", prefill, 1), ("steps", steps, 0)):
        if type(value) is not int or value < least:
            raise RecordingError(f"scenario {name}: {key} must be a number of at least {least}")
    reading = fields.get("reading", "intended")
    if reading not in ("intended", "literal"):
        raise RecordingError(f"scenario {name}: reading must be intended or literal")
    keep = fields.get("keep")
    unknown = sorted(set(keep or ()) - set(TAPS))
    if unknown:
        raise RecordingError(f"scenario {name}: keep names no tap: {unknown[0]}")
    configuration = configurations.get(fields["set"])
    if configuration is None:
        raise RecordingError(f"scenario {name}: no set {fields['set']}")
    config = ModelConfig.from_mapping(configuration, f"set {fields['set']}")
    if prefill + steps > configuration["max_seq_len"] or batch > configuration["max_batch_size"]:
        raise RecordingError(f"scenario {name}: beyond max_seq_len or max_batch_size of its set")
    image = _image(fields["image"], name) if "image" in fields else None
    if image is not None:
        if batch > 1:
            raise RecordingError(f"scenario {name}: an image takes a batch of 1")
        make_image(config, image, prefill, f"scenario {name}", 0)
    kept = None if keep is None else tuple(keep)
    drafts = fields.get("drafts", False)
    if type(drafts) is not bool or (drafts and not (config.n_mtp_layers and config.dspark_block_size)):
        raise RecordingError(f"scenario {name}: drafts is true or false, and takes n_mtp_layers and dspark_block_size")
    return RecordedScenario(fields["set"], name, batch, prefill, steps, reading, kept, image, drafts)


def _image(fields: Any, name: str) -> DeclaredImage:
    least = {"start": 0, "rows": 1, "columns": 1}
    if not isinstance(fields, Mapping) or fields.keys() != least.keys():
        raise RecordingError(f"scenario {name}: image has exactly {', '.join(least)}")
    for key, smallest in least.items():
        if type(fields[key]) is not int or not smallest <= fields[key] <= LARGEST_SIDE:
            raise RecordingError(f"scenario {name}: image: {key} must be a number from {smallest} to {LARGEST_SIDE}")
    return DeclaredImage(**fields)


def _plain(name: Any, kind: str) -> str:
    # It becomes a file name.
    if not isinstance(name, str) or not _PLAIN.fullmatch(name) or name == "weights":
        raise RecordingError(f"{kind} {one_line(repr(name))}: not a plain lower-case name")
    return name


def _with_nulls(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: the text "null" stands for it."""
    return {key: None if value == "null" else value for key, value in configuration.items()}
