"""A checkout of the published code as a target, tried on the stand-in that recording is tested with."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from conformance.adapters.target import open_target
from conformance.cases import catalogue
from conformance.cases.case import Case
from conformance.errors import TargetError
from conformance.fixtures import Fixtures
from conformance.runner import run_case

STANDIN = Path(__file__).parents[1] / "recording" / "standin"
PREFILL = "model/free-running/prefill-2-tokens"


@cache
def cases() -> dict[str, Case]:
    return {found.id: found for found in catalogue.catalogue(Fixtures.open(None, verify=False))}


def case(case_id: str) -> Case:
    return cases()[case_id]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STANDIN, tmp_path / "inference", ignore=shutil.ignore_patterns("__pycache__")))


def change(checkout: Path, old: str, new: str) -> None:
    text = (checkout / "model.py").read_text()
    assert old in text
    (checkout / "model.py").write_text(text.replace(old, new))


def test_nothing_is_executed_before_the_user_agrees(checkout: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    change(checkout, "import torch\n", f"import torch\nopen({str(proof)!r}, 'w')\n")
    command = [sys.executable, "-m", "conformance", "check", f"upstream:{checkout}", "-k", PREFILL]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("nothing was executed: read the code, then say --yes")
    assert hashlib.sha256((checkout / "model.py").read_bytes()).hexdigest() in refused.stderr
    assert not proof.exists()
    assert subprocess.run([*command, "--yes"], capture_output=True, timeout=300).returncode == 0
    assert proof.exists()


def test_an_agreed_checkout_runs_the_golden_model() -> None:
    session = open_target(f"upstream:{STANDIN}", agreed=True)
    assert session.describe().reading == "literal"
    assert run_case(case(PREFILL), session).status == "PASS"
    # A prefill, then steps, in both readings: the second call must be watched as the first.
    assert run_case(case("model/free-running/decode-from-first-token"), session).status == "PASS"


def test_a_mistake_in_the_checkout_is_found(checkout: Path) -> None:
    # The factor of 2 of the write coefficients is left out.
    change(checkout, "self.hc_post(y, h, post, comb), handed_on", "self.hc_post(y, h, 0.5 * post, comb), handed_on")
    assert run_case(case(PREFILL), open_target(f"upstream:{checkout}", agreed=True)).status == "FAIL"


PARTS = (
    "attention/source-ratio-2/prefill-2-tokens",
    "attention/query-latent/trace",
    "block/mix-one-sublayer-late-source-ratio-2/prefill-2-tokens",
    "block/mix-one-sublayer-late-window-only/prefill-2-tokens",
    "compressor/carry-ratio-2/prefill-2-tokens",
    "engram/hash/image-barrier",
    "experts/random-weights/every-expert-in-turn",
    "gate/vectors/bias-against-score",
    "hyper_connections/coefficients/attention",
    "moe/routing-into-experts/trace",
    "stack/source-before-reuse-layers-2-3/prefill-2-tokens",
)


@pytest.mark.parametrize("case_id", PARTS)
def test_the_parts_of_a_checkout_are_judged_one_by_one(case_id: str) -> None:
    result = run_case(case(case_id), open_target(f"upstream:{STANDIN}", agreed=True))
    assert (result.status, result.message) == ("PASS", "")


@pytest.mark.parametrize("reading", ["intended", "literal"])
def test_an_attention_keeps_its_state_from_call_to_call(reading: str) -> None:
    stale = "-stale-index-keys" if reading == "literal" else ""
    chosen = case(f"attention/source-ratio-2{stale}/decode-from-first-token")
    assert chosen.reading == reading
    assert run_case(chosen, open_target(f"upstream:{STANDIN}", agreed=True)).status == "PASS"


def test_a_mistake_in_the_attention_is_reported_there(checkout: Path) -> None:
    change(checkout, "o = rotate(config, self.layer, o, positions, inverse=True)", "pass")
    session = open_target(f"upstream:{checkout}", agreed=True)
    sound = (
        "attention/query-latent/trace",
        "gate/vectors/bias-against-score",
        "compressor/carry-ratio-2/prefill-2-tokens",
    )
    assert [run_case(case(case_id), session).status for case_id in sound] == ["PASS"] * len(sound)
    found = run_case(case("attention/source-ratio-2/prefill-2-tokens"), session)
    assert found.status == "FAIL"
    assert {tap.tap for tap in found.taps if not tap.worst.verdict.passed} == {"attn_out"}
    assert run_case(case(PREFILL), session).status == "FAIL"


def test_a_part_that_is_called_otherwise_is_named_with_its_declaration(checkout: Path) -> None:
    change(checkout, "def forward(self, x, image_mask):\n        flat", "def forward(self, x):\n        flat")
    result = run_case(case("moe/routing-into-experts/trace"), open_target(f"upstream:{checkout}", agreed=True))
    assert result.status == "CRASH"
    assert "moe: layers.{l}.ffn(x, image_mask) (assumed): too many positional arguments" in result.message


def test_no_released_model_is_made_for_the_sake_of_a_part() -> None:
    result = run_case(
        case("gate/six-of-384-with-image-bias/released-width"), open_target(f"upstream:{STANDIN}", agreed=True)
    )
    assert result.status == "UNSUPPORTED"
    assert "the code makes parts with a whole model" in result.message


def test_a_parameter_of_another_type_is_named(checkout: Path) -> None:
    change(
        checkout,
        "self.attn_sink = frozen(config.n_heads, dtype=torch.float32)",
        "self.attn_sink = frozen(1, dtype=torch.float32)",
    )
    result = run_case(case(PREFILL), open_target(f"upstream:{checkout}", agreed=True))
    assert result.status == "CRASH"
    assert "layers.0.attn.attn_sink" in result.message


@pytest.mark.parametrize("damage", ["missing", "file"])
def test_what_is_no_checkout_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "inference"
    if damage == "file":
        path.write_text("")
    with pytest.raises(TargetError, match="not a directory"):
        open_target(f"upstream:{path}", agreed=True)
