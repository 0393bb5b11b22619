"""The command on the released layout and on folders that are damaged, inconsistent or hostile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from checkpoint_folders import Stored, header_of, stored_tensors, write_folder, write_index, write_raw, write_shard

import fixtures as shipped
from conformance.checkpoint import INDEX, Checkpoint, check_checkpoint
from conformance.checkpoint_layout import layout
from conformance.errors import FixtureError
from conformance.report.checkpoint import print_checkpoint
from conformance.report.terminal import make_console

CONFIG = (Path(shipped.__file__).parent / "tiny" / "config.json").read_text()
TENSORS = stored_tensors(layout(json.loads(CONFIG), "tiny"))
SHARDS = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
EXPERT = "layers.0.ffn.experts.0.w1"
#: A tensor of the first shard and one of the last.
FIRST, LAST = "embed.weight", "vision.blocks.1.mlp.w2.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_folder(directory, TENSORS, len(SHARDS))
    (directory / "config.json").write_text(CONFIG)
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, Stored]], object]) -> Checkpoint:
    """Change the tensors of a conforming folder and check it."""
    tensors = dict(TENSORS)
    change(tensors)
    write_folder(directory, tensors, len(SHARDS))
    return check_checkpoint(directory)


def lines(found: Checkpoint) -> list[str]:
    return [f"{problem.kind}: {problem.name}: {problem.detail}" for problem in found.problems]


def test_the_released_layout_in_a_hundred_shards(tmp_path: Path) -> None:
    """The whole command, in a process of its own; the limit is the promise, a thirtieth of it is usual."""
    released = json.loads(resources.files("conformance").joinpath("configs/released.json").read_bytes())
    tensors = stored_tensors(layout(released, "released"))
    write_folder(tmp_path / "model", tensors, 100)
    start = time.perf_counter()
    command = [sys.executable, "-m", "conformance", "checkpoint", str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.perf_counter() - start < 20
    assert (run.returncode, run.stderr) == (0, "")
    for text in (
        "the released configuration (the folder has no config.json)",
        f"100 shards, {len(tensors):,} tensors",
        *("13,759,918,710", "55,023,454,680", "220,093,818,720", "763,205,315,794"),
        "conforms: 0 problems",
    ):
        assert text in run.stdout


def test_accepted_alternatives(folder: Path) -> None:
    def change(tensors: dict[str, Stored]) -> None:
        tensors["head.weight"] = ("F32", tensors["head.weight"][1])
        tensors[f"{EXPERT}.weight"] = ("I8", tensors[f"{EXPERT}.weight"][1])
        tensors["layers.0.attn.wo_a.weight"] = ("BF16", tensors["layers.0.attn.wo_a.weight"][1])
        del tensors["layers.0.attn.wo_a.scale"]

    found = rewrite(folder, change)
    assert lines(found) == []
    assert found.exit_code == 0


def replace(name: str, stored: Stored) -> Callable[[dict[str, Stored]], object]:
    return lambda tensors: tensors.__setitem__(name, stored)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.pop("layers.3.attn.attn_sink"), "missing: layers.3.attn.attn_sink: expected F32 [4]"),
        (lambda t: t.pop(f"{EXPERT}.scale"), f"missing: {EXPERT}.scale: expected F8_E8M0 [64, 4]"),
        (replace("layers.99.attn_sink", ("F32", (4,))), "extra: layers.99.attn_sink: F32 [4]"),
        (
            replace(f"{EXPERT}.weight", ("U8", (64, 128))),
            f"shape: {EXPERT}.weight: [64, 128], expected [64, 64] (2 codes a byte: this holds one)",
        ),
        (
            replace(f"{EXPERT}.weight", ("BF16", (64, 128))),
            f"dtype: {EXPERT}.weight: BF16, expected U8 or I8",
        ),
        (
            replace("layers.0.attn.wq_a.weight", ("F8_E4M3", (128, 64))),
            "shape: layers.0.attn.wq_a.weight: [128, 64], expected [64, 128]",
        ),
        (
            replace("layers.0.attn.wq_b.scale", ("F8_E8M0", (2, 1))),
            "scale shape: layers.0.attn.wq_b.scale: [2, 1], expected [8, 2]",
        ),
        (
            replace("layers.0.attn.wq_b.scale", ("F32", (8, 2))),
            "scale dtype: layers.0.attn.wq_b.scale: F32, expected F8_E8M0",
        ),
        (
            replace("mtp.0.embed.weight", ("BF16", (512, 128))),
            "tied: mtp.0.embed.weight: shares embed.weight and must not be stored again",
        ),
        (replace("norm.weight", ("F8_E5M2", (128,))), "dtype: norm.weight: F8_E5M2, expected BF16"),
    ],
)
def test_a_tensor_that_does_not_conform(folder: Path, change: Callable[[dict[str, Stored]], object], line: str) -> None:
    found = rewrite(folder, change)
    assert lines(found) == [line]
    assert found.exit_code == 1


def test_one_mistake_in_every_expert_is_reported_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(tensors: dict[str, Stored]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith("w2.scale")]:
            del tensors[name]

    found = rewrite(folder, change)
    print_checkpoint(make_console(), found)
    out = capsys.readouterr().out
    assert "missing: layers.*.ffn.experts.*.w2.scale: 192 times\n" in out
    assert "missing: mtp.*.ffn.experts.*.w2.scale: 18 times\n" in out
    assert out.count("layers.") < 10
    assert "does not conform: 210 problems" in out


# The index against the shards


def edit_index(directory: Path, **changes: str | None) -> None:
    placed = json.loads((directory / INDEX).read_text())["weight_map"]
    placed |= changes
    write_index(directory, {name: shard for name, shard in placed.items() if shard is not None})


def test_the_index_disagrees_with_the_shards(folder: Path) -> None:
    edit_index(folder, **{FIRST: SHARDS[3], LAST: None, "ghost.weight": SHARDS[0]})
    assert lines(check_checkpoint(folder)) == [
        f"misplaced: {FIRST}: the index says {SHARDS[3]}, it is in {SHARDS[0]}",
        f"missing: ghost.weight: the index says {SHARDS[0]}, which lacks it",
        f"unlisted: {LAST}: in {SHARDS[3]}, but not in the index",
    ]


def test_a_tensor_in_two_shards(folder: Path) -> None:
    write_shard(folder / "model-extra.safetensors", {FIRST: TENSORS[FIRST]})
    assert [line.split(":")[0] for line in lines(check_checkpoint(folder))] == ["unlisted"]
    edit_index(folder, ghost="model-extra.safetensors")
    assert f"duplicate: {FIRST}: in {SHARDS[0]} and in model-extra.safetensors" in lines(check_checkpoint(folder))


def test_an_absent_shard(folder: Path) -> None:
    (folder / SHARDS[3]).unlink()
    found = check_checkpoint(folder)
    assert found.exit_code == 2
    assert found.unreadable == [f"{SHARDS[3]}: cannot be read: No such file or directory"]
    assert found.problems == []  # The one line says it all.
    partial = check_checkpoint(folder, partial=True)
    assert (partial.exit_code, partial.absent, partial.problems) == (0, [SHARDS[3]], [])


def test_a_partial_folder_is_checked_all_the_same(folder: Path) -> None:
    rewrite(folder, replace(f"{EXPERT}.weight", ("BF16", (64, 128))))
    (folder / SHARDS[3]).unlink()
    assert check_checkpoint(folder, partial=True).exit_code == 1
    (folder / INDEX).unlink()
    without_index = check_checkpoint(folder, partial=True)
    assert [problem.kind for problem in without_index.problems] == ["dtype"]


# Hostile files. Each gets one line and exit code 2, and the rest is checked.


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b", "a\0b", ""]
)
def test_an_index_that_points_elsewhere(folder: Path, name: str) -> None:
    (folder.parent / "outside.safetensors").write_bytes(b"never read")
    edit_index(folder, **{FIRST: name})
    found = check_checkpoint(folder)
    assert found.exit_code == 2
    assert [line.endswith("not the plain name of a file in the folder") for line in found.unreadable] == [True]
    assert all(line.isprintable() for line in found.unreadable)


def link_out(path: Path) -> None:
    outside = path.parent.parent / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def huge_header(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def large_header(path: Path) -> None:
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)


def header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        entries, data_bytes = header_of({FIRST: TENSORS[FIRST], "norm.weight": TENSORS["norm.weight"]})
        change(entries)
        write_raw(path, json.dumps(entries).encode(), data_bytes)

    return damage


def twice(path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_raw(path, f'{{"a":{entry},"a":{entry}}}'.encode(), 1)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (link_out, "a link out of the folder"),
        (fifo, "not a regular file"),
        (loop, "cannot be read"),
        (huge_header, "truncated"),
        (large_header, "header of 200000000 bytes"),
        (lambda path: path.write_bytes(b"abc"), "truncated"),
        (lambda path: write_raw(path, b"[" * 100_000, 0), "not valid JSON"),
        (twice, "duplicate key a"),
        (header(lambda e: e["norm.weight"].update(data_offsets=[0, 256])), "overlaps"),
        (header(lambda e: e["norm.weight"].update(data_offsets=[1 << 60, (1 << 60) + 256])), "gap"),
        (header(lambda e: e["norm.weight"].update(shape=[1 << 70])), "not a list of sizes"),
        (header(lambda e: e["norm.weight"].update(shape=[-1, -128])), "not a list of sizes"),
        (header(lambda e: e["norm.weight"].update(dtype="F128")), "is not one of"),
        (header(lambda e: e["norm.weight"].update(shape=[129])), "256 bytes, BF16 [129] takes 258"),
    ],
)
def test_a_hostile_shard(folder: Path, damage: Callable[[Path], None], fault: str) -> None:
    damage(folder / SHARDS[0])
    found = check_checkpoint(folder)
    assert found.exit_code == 2
    assert len(found.unreadable) == 1
    assert found.unreadable[0].startswith(SHARDS[0])
    assert fault in found.unreadable[0]
    assert found.problems == []
    assert found.shards == SHARDS[1:]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (INDEX, "{", "not valid JSON"),
        (INDEX, "[]", "not a JSON object"),
        (INDEX, '{"weight_map": {"a": 1}}', "weight_map"),
        (INDEX, '{"weight_map": {"a": "x", "a": "y"}}', "duplicate key"),
        ("config.json", '{"dim": 1e999}', "missing"),
        ("config.json", " " * 1_000_001, "larger than"),
    ],
)
def test_an_unreadable_index_or_configuration(folder: Path, name: str, text: str, fault: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(FixtureError, match=fault) as error:
        check_checkpoint(folder)
    assert str(error.value).startswith(name)


def test_a_configuration_with_other_keys_is_passed_over(folder: Path) -> None:
    (folder / "inference").mkdir()
    (folder / "config.json").rename(folder / "inference" / "config.json")
    (folder / "config.json").write_text('{"hidden_size": 128}')
    found = check_checkpoint(folder)
    assert (found.configuration, found.exit_code) == ("inference/config.json", 0)


def test_the_links_of_a_hub_cache_are_followed(folder: Path) -> None:
    snapshot, blobs = folder.parent / "snapshots" / "main", folder.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert check_checkpoint(snapshot).exit_code == 0


def test_a_name_cannot_drive_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rewrite(folder, replace("\x1b[2J[bold]x", ("F32", (1,))))
    print_checkpoint(make_console(), found)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[2J[bold]x': F32 [1]" in out
