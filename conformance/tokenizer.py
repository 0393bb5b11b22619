"""The compressed vocabulary of Engram, built from a tokenizer's own file (numerics.md 8).

Reads a byte-level BPE `tokenizer.json`; no tokenizer library is needed, because a single token's text is the bytes that
its characters stand for.
"""

from __future__ import annotations

import json
import re
import unicodedata
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.errors import FixtureError

REPLACEMENT = "\ufffd"
"""What stands for bytes that are not UTF-8: the token is part of a character."""


def find_tokenizer(source: str) -> Path:
    """The tokenizer.json that `source` names: a file, a directory with one, or an installed package with one.

    Raises:
        FixtureError: there is none.
    """
    path = Path(source)
    for candidate in (path, path / "tokenizer.json"):
        if candidate.is_file():
            return candidate
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", source):
        # The package is not imported: only its file is wanted.
        spec = util.find_spec(source)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(folder) / "tokenizer.json").is_file():
                return Path(folder) / "tokenizer.json"
    raise FixtureError(f"{source}: neither a tokenizer.json, nor a directory or an installed package that holds one")


def read_tokens(path: Path) -> dict[int, str]:
    """Raw token strings by id: the vocabulary, and the added tokens over it.

    Raises:
        FixtureError: not a byte-level BPE tokenizer file.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        model, decoder = content["model"], content["decoder"]
        if model["type"] != "BPE" or decoder["type"] != "ByteLevel":
            raise FixtureError(
                f"{path}: a {model['type']} tokenizer with decoder {decoder['type']}, not byte-level BPE"
            )
        tokens = {int(number): str(token) for token, number in model["vocab"].items()}
        tokens |= {int(added["id"]): str(added["content"]) for added in content["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FixtureError(f"{path}: not a tokenizer file: {type(error).__name__}: {error}") from error
    if sorted(tokens) != list(range(len(tokens))):
        raise FixtureError(f"{path}: token ids are not 0 to {len(tokens) - 1} without a gap")
    return tokens


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


ALPHABET = byte_alphabet()


def decoded(token: str) -> str:
    """The text of one token; bytes that are no UTF-8 become U+FFFD, as every decoder shows them.

    A token with a character outside the byte alphabet is not made of bytes (added tokens are plain text).
    """
    if any(character not in ALPHABET for character in token):
        return token
    return bytes(ALPHABET[character] for character in token).decode("utf-8", errors="replace")


def normalised(text: str) -> str:
    """NFKC, NFD, accents stripped, lower case, runs of space, tab and line ends to one space, trimmed.

    An accent is any combining mark, spacing ones included: the vowel signs of Indic scripts go too.  A text that is
    exactly one space by then stays; a text of which nothing remains is kept as it was.
    """
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(character for character in folded if unicodedata.category(character)[0] != "M").lower()
    folded = re.sub(r"[ \t\r\n]+", " ", folded)
    return " " if folded == " " else folded.strip() or text


def compressed_map(tokens: dict[int, str]) -> npt.NDArray[np.int32]:
    """Compressed id of every token id, numbered in order of first appearance: int32 [vocabulary]."""
    numbers: dict[str, int] = {}
    result = np.empty(len(tokens), dtype=np.int32)
    for token_id in range(len(tokens)):
        token = tokens[token_id]
        text = decoded(token)
        key = token if REPLACEMENT in text else normalised(text)
        result[token_id] = numbers.setdefault(key, len(numbers))
    return result


def mistaken(tokens: dict[int, str], recorded: npt.NDArray[np.int32]) -> str:
    """Why a tokenizer is not the one of the recorded map, in words; empty when its map is equal."""
    if len(tokens) != recorded.size:
        return f"another tokenizer: {len(tokens):,} tokens, the model has {recorded.size:,}"
    found, expected = compressed_map(tokens), int(recorded.max()) + 1
    count = int(found.max()) + 1
    if count != expected:
        return f"another tokenizer: {count:,} compressed ids, the model has {expected:,}"
    different = np.flatnonzero(found != recorded)
    if different.size:
        first = int(different[0])
        return (
            f"another tokenizer: {different.size:,} compressed ids differ, the first of token {first} "
            f"({tokens[first]!r}): {found[first]}, the model has {recorded[first]}"
        )
    return ""
