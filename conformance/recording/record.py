"""Recording golden sets: run a checkout on seeded weights, watch it, write the files of fixtures/FORMAT.md."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from conformance import __version__
from conformance.adapters import upstream_kernels
from conformance.config import ModelConfig
from conformance.errors import ConformanceError
from conformance.fixtures import FORMAT_VERSION, STATE, Fixtures
from conformance.recipe import key, u
from conformance.recording import convert, upstream
from conformance.recording.call import Call
from conformance.recording.checkout import Checkout, imported
from conformance.recording.dspark import DraftObserver
from conformance.recording.images import RecordedImage, make_image, watching_image
from conformance.recording.kernels import WatchedKernels
from conformance.recording.scenarios import Plan, RecordedScenario, read_plan
from conformance.recording.taps import Observer, own_index_keys, submodule, within
from conformance.recording.upstream import RecordingError
from conformance.recording.weights import fill_weights
from conformance.tensors import Tensor, one_line, parse_json, write_atomically, write_safetensors

Kernels = Literal["upstream", "reference"]


@dataclass(frozen=True)
class RecordOptions:
    """What `conformance record` was asked to do."""

    checkout: Path
    out: Path
    kernels: Kernels = "reference"
    agreed: bool = False
    scenarios: Path | None = None
    revision: str | None = None


def record(options: RecordOptions, progress: Callable[[str], None]) -> int:
    """Record every scenario and write the sets; returns the exit code.

    Raises:
        RecordingError: the user has not agreed, or the checkout is not as declared; nothing is written then.
    """
    own = options.kernels == "reference"
    checkout = Checkout.read(options.checkout)
    if not own and "kernel.py" not in checkout.files:
        raise RecordingError(f"{one_line(str(options.checkout))}: no kernel.py in it, which --kernels upstream needs")
    for line in checkout.notice(own):
        progress(line)
    if not options.agreed:
        raise RecordingError("nothing was executed: read the code, then say --yes")
    if options.out.exists():
        raise RecordingError(f"{one_line(str(options.out))}: exists already")
    plan = read_plan(options.scenarios)
    _check_keys(checkout, plan)
    partial = options.out.with_name(f".{options.out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        with torch_settings("cpu" if own else "cuda") as settings:
            summaries = _record_all(checkout, plan, own, partial, progress)
        _write_manifest(partial, options, checkout, plan, settings, summaries)
        Fixtures.open(partial)  # What was written must be readable.
        partial.rename(options.out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"wrote {options.out}")
    return 0


def _check_keys(checkout: Checkout, plan: Plan) -> None:
    """A key that the published configuration has and a set has not would silently take the code's default."""
    published = parse_json(checkout.files[upstream.CONFIG_FILE].content, upstream.CONFIG_FILE)
    if not isinstance(published, dict):
        raise RecordingError(f"{upstream.CONFIG_FILE}: not a JSON object")
    for name, configuration in plan.configurations.items():
        missing = sorted(published.keys() - configuration.keys())
        if missing:
            raise RecordingError(f"set {name}: key {one_line(missing[0])} of {upstream.CONFIG_FILE} is not declared")


@contextmanager
def torch_settings(device: str) -> Iterator[Mapping[str, Any]]:
    """One thread, the declared default type, the device; as before afterwards."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RecordingError("--kernels upstream needs a CUDA device")
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, upstream.DEFAULT_DTYPE))
    try:
        with torch.device(device), torch.inference_mode():
            yield {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "threads": 1}
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def _record_all(
    checkout: Checkout, plan: Plan, own: bool, out: Path, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    summaries: dict[str, dict[str, Any]] = {}
    for scenario in plan.scenarios:
        progress(f"{scenario.set_name}/{scenario.name}")
        directory = out / scenario.set_name
        configuration = plan.configurations[scenario.set_name]
        # Imported anew each time: the code keeps state in globals, and a scenario must not see the one before.
        with blaming(), _imported(checkout, own) as (module, kernels):
            model, weights = build_model(module, configuration, plan.seed)
            image = _image(configuration, scenario, plan.seed)
            tensors = _run(module, kernels, model, configuration, scenario, image, plan.seed)
        if not directory.exists():
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(configuration, indent=1) + "\n")
            write_safetensors(directory / "weights.safetensors", weights)
        starts = [0, *range(scenario.prefill, scenario.prefill + scenario.steps)]
        metadata = {"scenario": scenario.name, "start_pos": json.dumps(starts), "reading": scenario.reading}
        if image is not None:
            metadata["image"] = image.metadata
        path = directory / f"{scenario.name}.safetensors"
        write_safetensors(path, tensors, metadata)
        name = f"{scenario.set_name}/{scenario.name}"
        summaries[name] = {"bytes": path.stat().st_size, "tensors": len(tensors), **metadata}
    return summaries


@contextmanager
def _imported(checkout: Checkout, own: bool) -> Iterator[tuple[ModuleType, WatchedKernels]]:
    kernels = WatchedKernels()
    with imported(checkout, upstream_kernels.module() if own else None, kernels.module) as module:
        yield module, kernels


def build_model(module: ModuleType, configuration: Mapping[str, Any], seed: int) -> tuple[Any, dict[str, Tensor]]:
    """A model with seeded weights."""
    torch.manual_seed(seed)
    arguments = attribute(module, upstream.ARGUMENTS)(**configuration)
    model = attribute(module, upstream.MODEL)(arguments)
    weights = fill_weights(model, configuration, seed)
    config = ModelConfig.from_mapping(configuration, "configuration")
    # A reduced vocabulary has no tokenizer: equal runs of ids share a compressed id, as readers of a set assume.
    ids = torch.arange(config.vocab_size) * config.engram_compressed_vocab_size // config.vocab_size
    for layer in config.engram_layer_ids:
        where = f"layers.{layer}.engram"
        token_map = getattr(submodule(model, where), str(upstream.TOKEN_MAP), None)
        if not isinstance(token_map, torch.Tensor) or token_map.shape != ids.shape:
            raise RecordingError(f"upstream: {where}.{upstream.TOKEN_MAP} is no tensor [{config.vocab_size}]")
        token_map.copy_(ids)
    return model.eval(), weights


def _run(
    module: ModuleType,
    kernels: WatchedKernels,
    model: Any,
    configuration: Mapping[str, Any],
    scenario: RecordedScenario,
    image: RecordedImage | None,
    seed: int,
) -> dict[str, Tensor]:
    """All tensors of a scenario."""
    config = ModelConfig.from_mapping(configuration, "configuration")
    shared = attribute(module, upstream.SHARED)
    observer = Observer(model, shared, config)
    drafts = DraftObserver(model, config, kernels) if scenario.drafts else None
    call = Call(scenario.batch, scenario.prefill, 0)
    calls = [call, *(replace(call, length=1, start=scenario.prefill + step) for step in range(scenario.steps))]
    ids = _input_ids(configuration, scenario, seed)
    tensors: dict[str, Tensor] = {}
    if image is not None:
        ids[:, image.span] = config.image_token_id
        tensors |= image.taps()
    with ExitStack() as stack:
        if scenario.reading == "intended":
            stack.enter_context(own_index_keys(model, shared, config, lambda: call))
        stack.enter_context(observer.watching(kernels))
        for number, call in enumerate(calls):
            fed = ids[:, call.start : call.start + call.length]
            observer.begin(call)
            if image is None or call.start:
                model(torch.as_tensor(fed), call.start)
            else:
                with watching_image(model) as of_image:
                    model(torch.as_tensor(fed), call.start, **image.argument())
                tensors |= of_image
            taps = observer.finish()
            taps["output_ids"] = Tensor("I32", taps["logits"].data.argmax(axis=-1).astype(np.int32))
            if drafts is not None:
                taps |= drafts.draft(taps["output_ids"].data, call.start)
            kept = {name: tap for name, tap in taps.items() if _keeps(scenario, name)}
            kept["input_ids"] = Tensor("I32", fed.astype(np.int32))
            tensors |= {f"call{number}/{name}": tap for name, tap in kept.items()}
    if drafts is not None:
        tensors |= drafts.state(call.batch)
    return tensors | recorded_state(model, observer, config, call)


def _image(configuration: Mapping[str, Any], scenario: RecordedScenario, seed: int) -> RecordedImage | None:
    if scenario.image is None:
        return None
    config = ModelConfig.from_mapping(configuration, "configuration")
    return make_image(config, scenario.image, scenario.prefill, f"{scenario.set_name}/{scenario.name}", seed)


def _keeps(scenario: RecordedScenario, name: str) -> bool:
    return scenario.keep is None or name.rpartition("/")[2] in scenario.keep


def _input_ids(configuration: Mapping[str, Any], scenario: RecordedScenario, seed: int) -> Any:
    """Token ids int64 [B, positions]: streams of the recipe, by names; image tokens are avoided."""
    length = scenario.prefill + scenario.steps
    vocabulary, image = configuration["vocab_size"], configuration.get("image_token_id")
    stream = key(f"{scenario.set_name}/{scenario.name}/input_ids", seed)
    ids = (u(stream, np.arange(scenario.batch * length)) % np.uint64(vocabulary)).astype(np.int64)
    ids[ids == image] = 0
    return ids.reshape(scenario.batch, length)


def recorded_state(
    model: Any, observer: Observer, config: ModelConfig, call: Call, part: str = ""
) -> dict[str, Tensor]:
    """State after the last call, as `state/layer{l}/{name}`; of the module at the path `part` alone, if one is given.

    Raises:
        RecordingError: a declared buffer does not exist or is not what a file may hold.
    """
    state: dict[str, Tensor] = {}
    for layer in range(config.n_layers):
        if config.compresses(layer) and within(upstream.ATTENTION_ROWS.module.format(l=layer), part):
            state[f"state/layer{layer}/compressed"] = observer.compressed(layer)
        for buffer in upstream.STATES:
            path = buffer.module.format(l=layer)
            if not upstream.has(config, layer, buffer.where) or not within(path, part):
                continue
            value = getattr(submodule(model, path), str(buffer.attribute), None)
            if not isinstance(value, torch.Tensor):
                raise RecordingError(f"upstream: {path}.{buffer.attribute} does not exist (state {buffer.state})")
            rows = {"window": config.window_size, "index_keys": config.ratio(layer) and call.rows(config, layer)}
            cut = value[: call.batch, : rows.get(buffer.state, config.ratio(layer))]
            label = f"upstream: {path}.{buffer.attribute}"
            state[f"state/layer{layer}/{buffer.state}"] = convert.tap(label, cut, STATE[buffer.state])
    return state


def attribute(module: ModuleType, name: upstream.Name) -> Any:
    """A declared attribute of the checkout's entry module.

    Raises:
        RecordingError: it does not exist.
    """
    if not hasattr(module, str(name)):
        raise RecordingError(f"upstream: {upstream.ENTRY}.{name} does not exist ({name.evidence})")
    return getattr(module, str(name))


@contextmanager
def blaming() -> Iterator[None]:
    """Errors of the executed code become one line that says where in it they happened."""
    try:
        yield
    except ConformanceError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if Path(f.filename).name in _SOURCES), frames[-1])
        where = f"{Path(place.filename).name}:{place.lineno}"
        raise RecordingError(f"upstream: {where}: {type(error).__name__}: {one_line(str(error))}") from error


_SOURCES = frozenset(f"{name}.py" for name in upstream.MODULES)


def _write_manifest(
    directory: Path,
    options: RecordOptions,
    checkout: Checkout,
    plan: Plan,
    settings: Mapping[str, Any],
    summaries: Mapping[str, Any],
) -> None:
    """Provenance without dates or paths of this machine: the same run gives the same bytes."""
    own = options.kernels == "reference"
    manifest = {
        "upstream": {
            "repository": upstream.REPOSITORY,
            "revision": options.revision,
            "model_py_sha256": checkout.files["model.py"].sha256,
            "files": {name: file.sha256 for name, file in checkout.files.items()},
            "pinned": all(file.standing() != "DIFFERS from the pinned revision" for file in checkout.files.values()),
            "executed": True,
        },
        "kernels": {
            "kind": "the suite's reference on a CPU" if own else "kernel.py of the checkout",
            "exact": ["act_quant", "fp4_act_quant"] if own else sorted(upstream.KERNELS),
            "within_rounding": ["fp8_gemm", "fp4_gemm", "sparse_attn", "hc_split_sinkhorn"] if own else [],
        },
        **versions(),
        **settings,
        "seed": plan.seed,
        "declarations_sha256": hashlib.sha256(plan.text).hexdigest(),
        "command": f"conformance record --upstream DIR --out DIR --kernels {options.kernels} --yes"
        + (" --scenarios FILE" if options.scenarios else "")
        + (f" --revision {options.revision}" if options.revision else ""),
        "scenarios": dict(summaries),
    }
    write_manifest(directory, manifest)


def versions() -> dict[str, Any]:
    """What ran a recording, for its provenance."""
    return {
        "torch": torch.__version__,
        "versions": {
            "conformance": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    }


def write_manifest(directory: Path, provenance: Mapping[str, Any]) -> None:
    """Write `manifest.json`: the provenance, and the hash of every file that is there."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): _sha256(path) for path in paths}
    content = json.dumps({"format": FORMAT_VERSION, **provenance, "files": files}, indent=1)
    write_atomically(directory / "manifest.json", [content.encode() + b"\n"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def print_progress(line: str) -> None:
    """Progress goes to standard error."""
    print(line, file=sys.stderr)
