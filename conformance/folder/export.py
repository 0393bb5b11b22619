"""`conformance export`: cases without answers, as a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import conformance
from conformance.cases import catalogue
from conformance.cases.case import Advance, Call, Case, Open, Request
from conformance.errors import ConformanceError
from conformance.fixtures import Fixtures
from conformance.folder.layout import (
    ARGUMENTS,
    CASES,
    COMMANDS,
    RESULTS,
    WEIGHTS,
    ExportedCase,
    Manifest,
    results_name,
)
from conformance.folder.questions import questions_digest, tensor_digest
from conformance.lazy import LazyTensors
from conformance.protocol import messages
from conformance.protocol.store import recipe_reference, write_tensors
from conformance.protocol.values import RESET, Reference, encode_request
from conformance.selection import Selection, select
from conformance.tensors import Tensor, one_line, write_atomically

README = "README.md"
RECIPE = "RECIPE.md"


@dataclass(frozen=True)
class ExportOptions:
    """What `conformance export` was asked to do."""

    folder: Path
    selection: Selection
    fixtures: Path | None = None
    materialize: bool = False
    """Write weights of the recipe as tensors, too."""


def export(options: ExportOptions, progress: Callable[[str], None]) -> int:
    """Write the questions of the selected cases, for both readings; returns the exit code.

    The bytes depend on the fixtures and the selection alone.  The manifest is written last: a folder without one is not
    complete.

    Raises:
        ConformanceError: the selection is empty, or the folder exists and is not empty.
    """
    fixtures = Fixtures.open(options.fixtures)
    cases = select(catalogue.catalogue(fixtures), options.selection)
    folder = options.folder
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConformanceError(f"{one_line(str(folder))}: exists already and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).mkdir()
    writer = _Writer(folder, options.materialize)
    exported = {case.id: writer.write(case) for case in cases}
    _write_texts(folder, writer.has_recipe)
    selection = options.selection
    manifest = Manifest(
        conformance.__version__,
        fixtures.lock_hash,
        {
            "level": selection.level,
            "expression": selection.expression,
            "components": list(selection.components),
            "set": selection.set_name,
        },
        exported,
    )
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest.write(folder, {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()})
    size = sum(path.stat().st_size for path in files.values())
    steps = sum(case.steps for case in exported.values())
    counted = f"{_counted(len(exported), 'case')}, {_counted(steps, 'step')}"
    progress(f"wrote {counted}, {size / 2**20:.1f} MiB: {one_line(str(folder))}")
    progress(f"answers go to {RESULTS}/, see {README} there; then: conformance check dir:{one_line(str(folder))}")
    return 0


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class _Writer:
    """Writes case after case; a weight that several need is written once."""

    def __init__(self, folder: Path, materialize: bool) -> None:
        self._folder, self._materialize = folder, materialize
        self._weights: dict[str, Reference] = {}
        """By hash of the tensor."""
        self._weight_files = 0
        self._units: dict[int, tuple[Mapping[str, Tensor], Mapping[str, Reference]]] = {}
        """Of the case at hand: kept with the weights, so that an id stays that of one object."""
        self._arguments: Mapping[str, Reference] = {}
        """Of the case at hand, by hash of the tensor."""
        self.has_recipe = False

    def write(self, case: Case) -> ExportedCase:
        """Write the commands of one case and their tensors."""
        requests = [step.request for step in case.steps()]
        directory = self._folder / CASES / case.id
        directory.mkdir(parents=True)
        (self._folder / RESULTS / case.id).mkdir(parents=True)
        self._write_arguments(directory, requests)
        self._units.clear()
        lines = []
        for number, request in enumerate(requests):
            answer = Path(RESULTS, case.id, results_name(number))
            lines.append(messages.encode(messages.run(encode_request(request, self), answer), number))
        end = Path(RESULTS, case.id, results_name(len(requests)))
        lines.append(messages.encode(messages.run(RESET, end), len(requests)))
        write_atomically(directory / COMMANDS, lines)
        methods = dict.fromkeys(request.method for request in requests if isinstance(request, Call | Open))
        return ExportedCase(
            case.id, case.level, case.reading, tuple(methods), len(requests), questions_digest(requests)
        )

    def _write_arguments(self, directory: Path, requests: Sequence[Request]) -> None:
        """One file for the case; what several steps are given is there once, under the name of the first."""
        distinct: dict[str, str] = {}
        tensors: dict[str, Tensor] = {}
        for number, request in enumerate(requests):
            for name, value in _tensors(request).items():
                digest = tensor_digest(value)
                if digest not in distinct:
                    distinct[digest] = f"{number:03d}/{name}"
                    tensors[distinct[digest]] = value
        if not tensors:
            self._arguments = {}
            return
        path = directory / ARGUMENTS
        written = write_tensors(path, tensors, self._shown(path))
        self._arguments = {digest: written[key] for digest, key in distinct.items()}

    def tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        """References to arguments that have been written already."""
        return {name: self._arguments[tensor_digest(tensor)] for name, tensor in tensors.items()}

    def weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        """Write what no unit before had; weights of the recipe are described."""
        if id(weights) not in self._units:
            self._units[id(weights)] = (weights, self._write_unit(weights))
        return self._units[id(weights)][1]

    def _write_unit(self, weights: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        if not isinstance(weights, LazyTensors):
            return self._write_weights(weights)
        references: dict[str, Reference] = {}
        for name in weights:
            made = None if self._materialize else weights.recipe(name)
            if made is not None:
                self.has_recipe = True
                references[name] = recipe_reference(made)
            else:
                # One at a time: together they may not fit into memory.
                references.update(self._write_weights({name: weights[name]}))
        return references

    def _write_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        digests = {name: tensor_digest(tensor) for name, tensor in weights.items()}
        first = {digest: name for name, digest in reversed(digests.items()) if digest not in self._weights}
        if first:
            self._weight_files += 1
            path = self._folder / WEIGHTS / f"{self._weight_files:04d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            written = write_tensors(path, {name: weights[name] for name in first.values()}, self._shown(path))
            self._weights.update({digest: written[name] for digest, name in first.items()})
        return {name: self._weights[digest] for name, digest in digests.items()}

    def _shown(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def _tensors(request: Request) -> Mapping[str, Tensor]:
    if isinstance(request, Call | Open):
        arguments = request.arguments
    elif isinstance(request, Advance):
        arguments = request.inputs
    else:
        arguments = {}
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _write_texts(folder: Path, has_recipe: bool) -> None:
    """What whoever receives the folder needs to read, and no more."""
    text = resources.files("conformance.folder").joinpath(README).read_bytes()
    write_atomically(folder / README, (text,))
    if has_recipe:
        write_atomically(folder / RECIPE, (resources.files("fixtures").joinpath(RECIPE).read_bytes(),))
