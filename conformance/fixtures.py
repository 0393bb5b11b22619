"""Golden sets: finding, verifying and reading them. `fixtures/FORMAT.md` is the format this module reads.

Opening checks hashes (unless told not to) and the header of every file; tensor data is read when asked for.
Every fault is a `FixtureError` of one line that names the file, relative to the fixtures directory, and the tensor.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import fixtures as shipped
from conformance.checkpoint_weights import CheckpointTensors, Excerpt
from conformance.errors import FixtureError
from conformance.tensors import SafetensorsFile, Tensor, one_line, parse_json, write_atomically

FORMAT_VERSION = 1
LOCK, MANIFEST, CONFIG, RECIPE, WEIGHTS, CHECKPOINT = (
    "lock.json",
    "manifest.json",
    "config.json",
    "recipe.json",
    "weights.safetensors",
    "checkpoint.json",
)
LARGEST_JSON = 1 << 26
NOISE_FLOOR = "noise_floor.json"
"""Derived from the recordings and re-makeable from them, so neither locked nor part of a set."""


@dataclass(frozen=True)
class TapSpec:
    """What a recorded tensor is: its one dtype, the shapes it may have (axes in words) and what it means."""

    dtype: str
    shapes: tuple[str, ...]
    meaning: str

    @property
    def ranks(self) -> frozenset[int]:
        """The numbers of axes it may have."""
        return frozenset(len(shape.split()) for shape in self.shapes)


def _tap(dtype: str, shapes: str, meaning: str) -> TapSpec:
    return TapSpec(dtype, tuple(shapes.split(" | ")), meaning)


#: `call{c}/{name}`: once a call.
CALL_TAPS: Mapping[str, TapSpec] = {
    "input_ids": _tap("I32", "B T", "token ids fed to this call; the one tensor every call has"),
    "embed": _tap("BF16", "B T D", "token embedding before image features are placed and streams are made"),
    "main_hidden": _tap("BF16", "B T n·D", "hidden states of the n DSpark target layers side by side"),
    "final_norm": _tap("BF16", "B T D", "collapsed streams after the final norm"),
    "logits": _tap("F32", "B V", "logits of the last position"),
    "output_ids": _tap("I32", "B", "greedy next token"),
    "spec_ids": _tap("I32", "B 1+n", "the draft: this call's output id, then n drafted ids"),
    "spec_logits": _tap("F32", "B n V", "draft logits, Markov bias included"),
    "spec_confidence": _tap("F32", "B n", "raw draft confidence"),
}

#: `call{c}/layer{l}/{name}`: once a call and layer.
LAYER_TAPS: Mapping[str, TapSpec] = {
    "engram_in": _tap("BF16", "B T S D", "residual before Engram"),
    "engram_hash": _tap("I64", "B T cols", "rows of the Engram table"),
    "engram_out": _tap("BF16", "B T S D", "residual after Engram"),
    "h_in": _tap("BF16", "B T S D", "residual the block receives"),
    "pre_in": _tap("F32", "B T S", "reading mix the block receives"),
    "attn_pre": _tap("F32", "B T S", "reading mix from h_in, used by the feed-forward"),
    "attn_post": _tap("F32", "B T S", "writing weights of attention"),
    "attn_comb": _tap("F32", "B T S S", "stream mix of attention: index summed in the write, stream written"),
    "attn_in": _tap("BF16", "B T D", "input of attention, after read and norm"),
    "q_latent": _tap("BF16", "B T q_lora", "query latent after its norm"),
    "attn_q": _tap("BF16", "B T H head_dim", "queries after RoPE"),
    "window_rows": _tap("BF16", "B T head_dim", "window rows of this call after RoPE and fake FP8"),
    "window_slots": _tap("I32", "B T min(T,W)", "window part of attn_list"),
    "latent": _tap("BF16", "B n head_dim", "compressor output before RoPE"),
    "compressed_rows": _tap("BF16", "B n head_dim", "rows written by this call after RoPE and fake FP4"),
    "index_keys": _tap("BF16", "B n index_dim", "index keys written by this call after RoPE and fake FP4"),
    "index_q": _tap("BF16", "B T H_index index_dim", "index queries after RoPE and fake FP4"),
    "index_weights": _tap("BF16", "B T H_index", "weight of each index head"),
    "index_score": _tap("BF16", "B T C", "index scores before top-k, -inf where masked"),
    "candidates": _tap("BOOL", "B T C", "positions inside the candidate blocks"),
    "selected": _tap("I32", "B T k", "selected compressed positions, ascending, then -1"),
    "attn_list": _tap("I32", "B T L", "all row indices given to sparse attention"),
    "attn_o": _tap("BF16", "B T H head_dim", "attention result before the inverse rotation"),
    "attn_out": _tap(
        "BF16", "B T D | B n S D", "after wo_b; in a DSpark layer that only seeds its ring, its 4-stream input"
    ),
    "h_mid": _tap("BF16", "B T S D", "residual after attention"),
    "ffn_pre": _tap("F32", "B T S", "reading mix from h_mid, used by the next layer"),
    "ffn_post": _tap("F32", "B T S", "writing weights of the feed-forward"),
    "ffn_comb": _tap("F32", "B T S S", "stream mix of the feed-forward"),
    "ffn_in": _tap("BF16", "B T D", "input of the mixture, after read and norm"),
    "gate_weights": _tap("F32", "B·T k", "routing weights"),
    "gate_indices": _tap("I32", "B·T k", "chosen experts, in the order the code gave them"),
    "ffn_out": _tap("BF16", "B T D", "output of the mixture"),
    "h_out": _tap("BF16", "B T S D", "residual for the next layer"),
    "pre_out": _tap("F32", "B T S", "reading mix for the next layer"),
    "main_x": _tap("BF16", "B T D", "what a DSpark layer got from the backbone for its ring"),
}

#: `state/layer{l}/{name}`: once a layer, after the last call.
STATE: Mapping[str, TapSpec] = {
    "window": _tap("BF16", "B W head_dim", "window ring; slot = position mod W"),
    "compressed": _tap("BF16", "B C head_dim", "all compressed rows"),
    "index_keys": _tap("BF16", "B C index_dim", "all index keys"),
    "carry_kv": _tap("F32", "B r head_dim", "kv of an unfinished group; old values stay"),
    "carry_score": _tap("F32", "B r head_dim", "gate of an unfinished group; old values stay"),
}

#: `image/{name}`: once a scenario that has an image.
IMAGE: Mapping[str, TapSpec] = {
    "patches": _tap("BF16", "n C P P", "pixels, patches row-major over the grid"),
    "token_types": _tap("I32", "B T", "-1 text, 0 start, 1 image, 2 newline, 3 end"),
    "vit_out": _tap("BF16", "n D_vit", "vision tower after its final norm"),
    "aligner_out": _tap("BF16", "m D", "features placed at the image tokens"),
}

#: Every recorded step, call and layer taps together.
TAPS: Mapping[str, TapSpec] = {**CALL_TAPS, **LAYER_TAPS}

_NUMBER = "(0|[1-9][0-9]*)"
_NAME = re.compile(f"(?:call{_NUMBER}/|(state)/|(image)/)(?:layer{_NUMBER}/)?([a-z_]+)")


class Scenario:
    """One recorded run: a prefill, then further calls.

    Attributes:
        name: the file's stem.
        start_positions: absolute position of the first token of each call.
        reading: which reading of `stale-index-keys` was recorded.
        image: the image's place and grid (`start`, `n_vit_h`, `n_vit_w`, `n_llm_h`, `n_llm_w`), None without one.
        batch: sequences in the batch.
        lengths: tokens of each call.
    """

    name: str
    start_positions: tuple[int, ...]
    reading: Literal["intended", "literal"]
    image: Mapping[str, int] | None
    batch: int
    lengths: tuple[int, ...]

    def __init__(self, path: Path, label: str, layer_count: int) -> None:
        """Open a scenario file and check names, dtypes and ranks against the tables above.

        Raises:
            FixtureError: the file, its metadata or a tensor is not of the format.
        """
        self.name = path.stem
        self._file = SafetensorsFile(path, label, cached=True)
        self._label = self._file.label
        self._layers: set[int] = set()
        self._taps: set[str] = set()
        self._read_metadata()
        for name in self._file:
            self._check(name, layer_count)
        self._read_lengths()

    def tap(self, call: int, name: str, layer: int | None = None) -> Tensor:
        """The tensor `call{call}/layer{layer}/{name}`, or `call{call}/{name}` without a layer.

        Raises:
            MissingTensorError: it was not recorded.
        """
        return self._file[_key(call, name, layer)]

    def has(self, call: int, name: str, layer: int | None = None) -> bool:
        """Whether that tap was recorded."""
        return _key(call, name, layer) in self._file

    def state(self, layer: int, name: str) -> Tensor:
        """The tensor `state/layer{layer}/{name}`, as it was after the last call.

        Raises:
            MissingTensorError: it was not recorded.
        """
        return self._file[f"state/layer{layer}/{name}"]

    @property
    def drafts(self) -> bool:
        """Whether the draft head was recorded."""
        return "spec_ids" in self._taps

    @property
    def has_state(self) -> bool:
        """Whether the state after the last call was recorded."""
        return any(name.startswith("state/") for name in self._file)

    def state_names(self, layer: int) -> tuple[str, ...]:
        """The states recorded for a layer, in the order of `STATE`."""
        return tuple(name for name in STATE if f"state/layer{layer}/{name}" in self._file)

    def extra(self, name: str) -> Tensor:
        """A tensor outside calls and state by its full name, such as `image/patches`.

        Raises:
            MissingTensorError: it was not recorded.
        """
        return self._file[name]

    @property
    def file(self) -> SafetensorsFile:
        """All tensors of the scenario under their full names."""
        return self._file

    def layers(self) -> tuple[int, ...]:
        """The layers that have a tap in some call, ascending."""
        return tuple(sorted(self._layers))

    def tap_names(self) -> tuple[str, ...]:
        """The taps recorded in some call, in the order of `TAPS`."""
        return tuple(name for name in TAPS if name in self._taps)

    def _read_metadata(self) -> None:
        metadata = self._file.metadata
        for key in ("scenario", "start_pos", "reading"):
            if key not in metadata:
                raise FixtureError(f"{self._label}: metadata {key} missing")
        if metadata["scenario"] != self.name:
            raise FixtureError(
                f"{self._label}: metadata scenario is {one_line(metadata['scenario'])}, not the file's name"
            )
        reading = metadata["reading"]
        if reading not in ("intended", "literal"):
            raise FixtureError(f"{self._label}: metadata reading is {one_line(reading)}, not intended or literal")
        self.reading = "literal" if reading == "literal" else "intended"
        starts = parse_json(metadata["start_pos"].encode(), f"{self._label}: metadata start_pos")
        if not isinstance(starts, list) or not all(type(start) is int and start >= 0 for start in starts):
            raise FixtureError(f"{self._label}: metadata start_pos is not a list of positions")
        if starts[:1] != [0]:
            raise FixtureError(f"{self._label}: metadata start_pos does not begin with a call at 0")
        self.start_positions = tuple(starts)
        self.image = None
        if "image" in metadata:
            image = parse_json(metadata["image"].encode(), f"{self._label}: metadata image")
            keys = {"start", "n_vit_h", "n_vit_w", "n_llm_h", "n_llm_w"}
            if not isinstance(image, dict) or set(image) != keys or not all(type(n) is int for n in image.values()):
                raise FixtureError(f"{self._label}: metadata image does not hold the numbers {', '.join(sorted(keys))}")
            self.image = image

    def _check(self, name: str, layer_count: int) -> None:
        where = f"{self._label}: tensor {one_line(name)}"
        match = _NAME.fullmatch(name)
        if match is None:
            raise FixtureError(f"{where}: unknown name")
        call, state, image, layer, tap = match.groups()
        if call is not None:
            table, layered = (CALL_TAPS, False) if layer is None else (LAYER_TAPS, True)
        else:
            table, layered = (STATE, True) if state else (IMAGE, False)
        if tap not in table or layered != (layer is not None):
            raise FixtureError(f"{where}: unknown name")
        if image and self.image is None:
            raise FixtureError(f"{where}: the metadata describes no image")
        # Compared as text first: a number of a thousand digits is not worth converting.
        if call is not None and (len(call) > 9 or int(call) >= len(self.start_positions)):
            raise FixtureError(f"{where}: start_pos lists {len(self.start_positions)} calls")
        if layer is not None and (len(layer) > 9 or int(layer) >= layer_count):
            raise FixtureError(f"{where}: the configuration has {layer_count} layers")
        spec, entry = table[tap], self._file.header.entries[name]
        if entry.dtype != spec.dtype:
            raise FixtureError(f"{where}: dtype {entry.dtype}, expected {spec.dtype}")
        if len(entry.shape) not in spec.ranks:
            shapes = " or ".join(f"[{', '.join(shape.split())}]" for shape in spec.shapes)
            raise FixtureError(f"{where}: shape {list(entry.shape)}, expected {shapes}")
        if call is not None:
            self._taps.add(tap)
            if layer is not None:
                self._layers.add(int(layer))

    def _read_lengths(self) -> None:
        shapes: list[tuple[int, ...]] = []
        for call in range(len(self.start_positions)):
            name = _key(call, "input_ids", None)
            entry = self._file.header.entries.get(name)
            if entry is None:
                raise FixtureError(f"{self._label}: tensor {name}: missing, every call in start_pos needs it")
            if 0 in entry.shape or (shapes and entry.shape[0] != shapes[0][0]):
                raise FixtureError(
                    f"{self._label}: tensor {name}: shape {list(entry.shape)} is empty or of another batch"
                )
            shapes.append(entry.shape)
        self.batch = shapes[0][0]
        self.lengths = tuple(length for _, length in shapes)


def _key(call: int, name: str, layer: int | None) -> str:
    return f"call{call}/{name}" if layer is None else f"call{call}/layer{layer}/{name}"


class ModelSet:
    """A model at some size and the scenarios recorded from it: a whole one with its weights, or layers of a checkpoint.

    Attributes:
        name: the subdirectory.
        config: the model's configuration, key names as upstream spells them.
        excerpt: where the weights of a set that stores none come from; such a set has layers, no embedding and no head.
        scenarios: by name, ascending.
    """

    kind: Literal["model"] = "model"

    def __init__(self, directory: Path, checkpoint: Path | None = None) -> None:
        """Open a set and check every header in it; `checkpoint` is where a set without weights finds them.

        Raises:
            FixtureError: a file is missing or not of the format, or the checkpoint is not that of the recording.
        """
        self.name = directory.name
        self.config: Mapping[str, Any] = _read_object(directory / CONFIG, f"{self.name}/{CONFIG}")
        layer_count = 0
        for key in ("n_layers", "n_mtp_layers"):
            count = self.config.get(key)
            if type(count) is not int or count < 0:
                raise FixtureError(f"{one_line(self.name)}/{CONFIG}: {key} is missing or not a count")
            layer_count += count
        self.excerpt: Excerpt | None = None
        self._weights: SafetensorsFile | CheckpointTensors | None = None
        label = f"{one_line(self.name)}/{CHECKPOINT}"
        if not (directory / CHECKPOINT).exists():
            self._weights = SafetensorsFile(directory / WEIGHTS, f"{self.name}/{WEIGHTS}", cached=True)
        elif (directory / WEIGHTS).exists():
            raise FixtureError(f"{label}: beside {WEIGHTS}: a set has one of them")
        else:
            self.excerpt = Excerpt.from_mapping(_read_object(directory / CHECKPOINT, label), layer_count, label)
            if checkpoint is not None:
                self._weights = CheckpointTensors(checkpoint, self.excerpt.layers, self.excerpt)
        paths = [path for path in _tensor_files(directory) if path.name != WEIGHTS]
        if not paths:
            raise FixtureError(f"{one_line(self.name)}: no scenario beside {WEIGHTS if self._weights else CHECKPOINT}")
        self.scenarios: Mapping[str, Scenario] = {
            path.stem: Scenario(path, f"{self.name}/{path.name}", layer_count) for path in paths
        }

    @property
    def weights(self) -> SafetensorsFile | CheckpointTensors:
        """Parameters by checkpoint name: stored ones are kept once they were read, those of a checkpoint are not.

        Raises:
            FixtureError: the set refers to a checkpoint, and none was given.
        """
        if self._weights is None:
            raise FixtureError(f"{one_line(self.name)}: recorded from a checkpoint: name it by --checkpoint DIR")
        return self._weights


class RecipeSet:
    """Outputs at sizes whose weights are not stored: inputs and weights follow from a recipe.

    Attributes:
        name: the subdirectory.
        recipe: `recipe.json`: the seed and test vectors for an implementation of the recipe.
        seed: the recipe's seed.
        parts: the files by stem, ascending; the metadata of each says what its inputs and weights are called.
    """

    kind: Literal["recipe"] = "recipe"

    def __init__(self, directory: Path) -> None:
        """Open a set and check every header in it.

        Raises:
            FixtureError: a file is missing or not of the format.
        """
        self.name = directory.name
        self.recipe: Mapping[str, Any] = _read_object(directory / RECIPE, f"{self.name}/{RECIPE}")
        seed = self.recipe.get("seed")
        if type(seed) is not int:
            raise FixtureError(f"{one_line(self.name)}/{RECIPE}: seed is missing or not a number")
        self.seed = seed
        self.parts: Mapping[str, SafetensorsFile] = {
            path.stem: SafetensorsFile(path, f"{self.name}/{path.name}") for path in _tensor_files(directory)
        }


class Fixtures:
    """A directory of golden sets.

    Attributes:
        directory: where it is.
        manifest: `manifest.json`: provenance and hashes.
        lock_hash: SHA-256, in hex, of `lock.json`, or of `manifest.json` in a directory without a lock. It pins
            every byte of every set, so a report that quotes it says what was checked against.
        sets: names of the sets, model sets first.
    """

    directory: Path
    manifest: Mapping[str, Any]
    lock_hash: str
    sets: tuple[str, ...]

    def __init__(self, directory: Path, verify: bool, checkpoint: Path | None) -> None:
        """See `open`."""
        self.directory = directory
        if not directory.is_dir():
            raise FixtureError(f"{one_line(str(directory))}: not a directory")
        lock, self.lock_hash, self.manifest = _read_lock(directory)
        if verify:
            _verify(directory, lock, self.manifest["files"])
        self._models: dict[str, ModelSet] = {}
        self._recipes: dict[str, RecipeSet] = {}
        for path in sorted(directory.iterdir()):
            if not path.is_dir() or _ignored_directory(path.name):
                continue
            if path.is_symlink():
                # What a link shows is in no lock.
                raise FixtureError(f"{one_line(path.name)}: a symbolic link instead of a directory")
            if (path / CONFIG).is_file():
                self._models[path.name] = ModelSet(path, checkpoint)
            elif (path / RECIPE).is_file():
                self._recipes[path.name] = RecipeSet(path)
            else:
                raise FixtureError(f"{one_line(path.name)}: a set has {CONFIG} or {RECIPE}, this directory neither")
        self.sets = (*self._models, *self._recipes)
        if not self.sets:
            raise FixtureError(f"{one_line(str(directory))}: no set in it")
        if checkpoint is not None and not any(model.excerpt for model in self._models.values()):
            raise FixtureError(f"--checkpoint {one_line(str(checkpoint))}: no set here was recorded from a checkpoint")

    @classmethod
    def open(cls, directory: Path | None = None, verify: bool = True, checkpoint: Path | None = None) -> "Fixtures":
        """Open the sets of a directory, the shipped ones when None.

        With `verify`, every file is read once and hashed; without, only headers are read. `checkpoint` is the folder of
        the weights of a set that was recorded from one.

        Raises:
            FixtureError: a file is missing, added, changed, or not of the format.
        """
        # Resolved now: an implementation may change the working directory while cases still read files.
        place = Path(shipped.__file__).parent if directory is None else Path(directory).resolve()
        return cls(place, verify, None if checkpoint is None else Path(checkpoint).resolve())

    def kind(self, name: str) -> Literal["model", "recipe"]:
        """Whether a set stores its weights (`model`) or names a recipe for them (`recipe`).

        Raises:
            FixtureError: no set of that name.
        """
        if name not in self.sets:
            raise FixtureError(f"no set {one_line(name)} in {one_line(str(self.directory))}: {', '.join(self.sets)}")
        return "model" if name in self._models else "recipe"

    def model(self, name: str) -> ModelSet:
        """A model set.

        Raises:
            FixtureError: no set of that name, or it is a recipe set.
        """
        if self.kind(name) != "model":
            raise FixtureError(f"{name}: a recipe set, without {CONFIG} and {WEIGHTS}")
        return self._models[name]

    def recipe(self, name: str) -> RecipeSet:
        """A recipe set.

        Raises:
            FixtureError: no set of that name, or it is a model set.
        """
        if self.kind(name) != "recipe":
            raise FixtureError(f"{name}: a model set, without {RECIPE}")
        return self._recipes[name]


@dataclass(frozen=True)
class _Locked:
    """What is recorded of a file; a manifest knows no sizes."""

    sha256: str
    size: int | None


def write_lock(directory: Path, set_version: str | None = None) -> Path:
    """Write `lock.json` over every data file of a directory and return its path.

    `set_version` None keeps the version of the lock that is there, or begins with "1".

    Raises:
        FixtureError: the files are not those of `manifest.json`: then the set is damaged, and a lock would hide it.
    """
    _, _, manifest = _read_lock(directory)
    found = {name: _digest(directory / name, name) for name in _data_files(directory)}
    _match_manifest(found, manifest["files"], "the directory")
    if set_version is None:
        path = directory / LOCK
        set_version = _read_object(path, LOCK)["set_version"] if path.is_file() else "1"
    files = {name: {"sha256": locked.sha256, "bytes": locked.size} for name, locked in found.items()}
    lock = {"format": FORMAT_VERSION, "set_version": set_version, "files": files}
    write_atomically(directory / LOCK, [json.dumps(lock, indent=1).encode() + b"\n"])
    return directory / LOCK


def _read_lock(directory: Path) -> tuple[dict[str, _Locked], str, Mapping[str, Any]]:
    """The recorded files, the hash of the record, and the manifest, which is the record where there is no lock."""
    manifest = _read_record(directory, MANIFEST)
    for name, sha256 in manifest["files"].items():
        if not _is_sha256(sha256):
            raise FixtureError(f"{MANIFEST}: {one_line(name)}: not a SHA-256")
    if not (directory / LOCK).exists():
        recorded = {name: _Locked(sha256, None) for name, sha256 in manifest["files"].items()}
        manifest_file = _digest(directory / MANIFEST, MANIFEST)
        return {**recorded, MANIFEST: manifest_file}, manifest_file.sha256, manifest

    lock = _read_record(directory, LOCK)
    if not isinstance(lock.get("set_version"), str):
        raise FixtureError(f"{LOCK}: set_version is missing or not text")
    recorded = {}
    for name, fields in lock["files"].items():
        if not isinstance(fields, dict) or not _is_sha256(fields.get("sha256")) or type(fields.get("bytes")) is not int:
            raise FixtureError(f"{LOCK}: {one_line(name)}: not a sha256 and bytes")
        recorded[name] = _Locked(fields["sha256"], fields["bytes"])
    return recorded, _digest(directory / LOCK, LOCK).sha256, manifest


def _read_record(directory: Path, name: str) -> dict[str, Any]:
    record = _read_object(directory / name, name)
    version = record.get("format")
    if type(version) is not int or version != FORMAT_VERSION:
        raise FixtureError(f"{name}: format {one_line(repr(version))}, this version reads {FORMAT_VERSION}")
    if not isinstance(record.get("files"), dict):
        raise FixtureError(f"{name}: files is missing or not an object")
    for file in record["files"]:
        # A record must not be able to point outside its directory.
        parts = PurePosixPath(file).parts
        if not parts or ".." in parts or "\\" in file or PurePosixPath(file).is_absolute():
            raise FixtureError(f"{name}: {one_line(file)}: not a path inside the directory")
    return record


def _verify(directory: Path, lock: Mapping[str, _Locked], manifest: Mapping[str, str]) -> None:
    """Compare a directory with its lock, and the lock with the manifest."""
    present = _data_files(directory)
    for name in (*(name for name in lock if name not in present), *(name for name in present if name not in lock)):
        problem = "missing" if name in lock else "not in the lock"
        raise FixtureError(f"{one_line(name)}: {problem}")
    for name, locked in lock.items():
        size = (directory / name).stat().st_size
        if locked.size is not None and size != locked.size:
            problem = "truncated" if size < locked.size else "too long"
            raise FixtureError(f"{one_line(name)}: {problem}: {size} bytes, the lock says {locked.size}")
        found = _digest(directory / name, name)
        if found.sha256 != locked.sha256:
            raise FixtureError(f"{one_line(name)}: damaged: SHA-256 {found.sha256}, recorded {locked.sha256}")
    _match_manifest(lock, manifest, LOCK)


def _match_manifest(files: Mapping[str, _Locked], manifest: Mapping[str, str], source: str) -> None:
    for name in sorted(files.keys() ^ (manifest.keys() | {MANIFEST})):
        holder, other = (source, MANIFEST) if name in files else (MANIFEST, source)
        raise FixtureError(f"{one_line(name)}: in {holder} but not in {other}")
    for name, sha256 in manifest.items():
        if files[name].sha256 != sha256:
            raise FixtureError(f"{one_line(name)}: {source} has SHA-256 {files[name].sha256}, {MANIFEST} says {sha256}")


def _data_files(directory: Path) -> list[str]:
    """Relative paths, sorted, of everything but the lock, noise floors, documentation, code and hidden files."""
    found = []
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not _ignored_directory(name)]
        for name in files:
            path = (Path(parent) / name).relative_to(directory).as_posix()
            if path not in (LOCK, NOISE_FLOOR) and not name.startswith(".") and not name.endswith((".md", ".py")):
                found.append(path)
    return sorted(found)


def _tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a set, hidden ones left out as the lock leaves them out."""
    return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("."))


def _ignored_directory(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _regular(path: Path, label: str) -> None:
    """Reading a pipe or a device might never end."""
    if path.exists() and not path.is_file():
        raise FixtureError(f"{one_line(label)}: not a regular file")


def _digest(path: Path, label: str) -> _Locked:
    _regular(path, label)
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return _Locked(sha256, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise FixtureError(f"{one_line(label)}: cannot be read: {error.strerror}") from error


def _read_object(path: Path, label: str) -> dict[str, Any]:
    _regular(path, label)
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_JSON + 1)
    except OSError as error:
        raise FixtureError(f"{one_line(label)}: cannot be read: {error.strerror}") from error
    if len(raw) > LARGEST_JSON:
        raise FixtureError(f"{one_line(label)}: larger than {LARGEST_JSON} bytes")
    parsed = parse_json(raw, label)
    if not isinstance(parsed, dict):
        raise FixtureError(f"{one_line(label)}: not a JSON object")
    return parsed


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
