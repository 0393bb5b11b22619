"""The workflows and job scripts in ci/: well formed, and made of commands that there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / "ci" / "workflows").glob("*.yml"))
SCHEMA = json.loads(Path(__file__).with_name("workflow_schema.json").read_text())
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}")


def load(path: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads the key `on` as true."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in data.items()}


def problems(workflow: dict[str, Any]) -> list[str]:
    """What Actions would refuse, or what would not do what it says."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    found = [f"{error.json_path}: {error.message[:120]}" for error in validator.iter_errors(workflow)]
    if found:
        return found
    inputs = (workflow["on"].get("workflow_dispatch") or {}).get("inputs", {})
    for name, job in workflow["jobs"].items():
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        found += [f"{name}: needs {need}, which there is not" for need in needs if need not in workflow["jobs"]]
        known = {f"matrix.{axis}" for axis in job.get("strategy", {}).get("matrix", {})}
        known |= {f"inputs.{given}" for given in inputs} | {"github.ref"}
        for expression in EXPRESSION.findall(json.dumps({**job, "group": workflow.get("concurrency")})):
            used = re.findall(r"[a-z]+\.[\w-]+", expression)
            found += [f"{name}: {word} is not defined" for word in used if word not in known]
        for step in job["steps"]:
            run = step.get("run", "")
            # What somebody else may have typed must come in by the environment, never as part of a script.
            found += [f"{name}: {text} in a script" for text in re.findall(r"\$\{\{\s*(?:inputs|github)\.", run)]
            found += [f"{name}: no target {word}" for word in re.findall(r"make ([a-z]+)", run) if word not in TARGETS]
    return found


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"cpu", "gpu", "nightly", "third-party"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path: Path) -> None:
    assert problems(load(path)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("run: make lint", "run: make lnit"),
        ("run: make lint", "runs: make lint"),
        ("run: make lint", "run: echo ${{ github.ref }}"),
        ("${{ matrix.python-version }}", "${{ matrix.python }}"),
        ("timeout-minutes: 15", "timeout-minutes: soon"),
        ("    timeout-minutes: 15\n", ""),
        ("actions/checkout@v4", "actions/checkout"),
        ("permissions:\n  contents: read\n", ""),
        ("    steps:", "    needs: build\n    steps:"),
        ("pull_request:", "pull_requests:"),
    ],
)
def test_what_is_wrong_is_seen(tmp_path: Path, old: str, new: str) -> None:
    text = (ROOT / "ci" / "workflows" / "cpu.yml").read_text()
    assert old in text
    (tmp_path / "cpu.yml").write_text(text.replace(old, new, 1))
    assert problems(load(tmp_path / "cpu.yml"))


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint() -> None:
    command = ["actionlint", "-ignore", 'label "gpu" is unknown', *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_options_of_conformance_exist(path: Path) -> None:
    for job in load(path)["jobs"].values():
        for step in job["steps"]:
            for command, rest in re.findall(r"conformance ([a-z]+)((?: [^\n]+)?)", step.get("run", "")):
                text = help_of(command)
                for option in re.findall(r"--[a-z-]+", rest):
                    assert option in text, f"conformance {command} has no {option}"


def help_of(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "conformance", command, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, f"there is no `conformance {command}`"
    return done.stdout


# The Slurm script ----------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path) -> Any:
    """Run the script with a `conformance` that only prints its arguments."""
    program = tmp_path / "bin" / "conformance"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "ci" / "slurm_array.sh"), *arguments],
            cwd=tmp_path,
            env={"PATH": f"{program.parent}:{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return call


def test_slurm_array(slurm: Any, tmp_path: Path) -> None:
    done = slurm("my_port:Port", "results", SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_TASK_COUNT="8")
    assert done.stdout == "check my_port:Port --shard 3/8 --json results/shard-3.jsonl\n"
    (tmp_path / "results" / "shard-3.jsonl").touch()
    done = slurm("--merge", "results")
    assert done.stdout == ("merge results/shard-3.jsonl --json results/report.jsonl --junit results/report.xml\n")


@pytest.mark.parametrize("arguments", [(), ("my_port:Port",), ("my_port:Port", "results")])
def test_slurm_outside_of_an_array_says_so(slurm: Any, arguments: tuple[str, ...]) -> None:
    done = slurm(*arguments)
    assert done.returncode != 0
    assert "array" in done.stderr
