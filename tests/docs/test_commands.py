"""Every command that the documentation shows is run, in the order of its page, where a reader would run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "console")
EXIT_CODE = re.compile(r"#.*\bexit code (\d+)")
LIMIT = 300

NOT_RUN = {
    r"not run by the tests": "the page says so",
    r"^make ": "what .ci/run does",
    r"^\. .*activate": "changes the shell",
    r"^sbatch ": "needs Slurm",
    r"^(git clone|pip install|gcc|nvcc) ": "changes the machine, or needs a compiler",
    r"\breference( --level full)?( --html \S+| --json \S+)*$": "the whole of the reference: `make check`",
    r"^conformance (record|checkpoint|tokenizer|noise-floor|lock) ": "needs what this machine does not have",
    r"\bPATH/TO\b|<[a-z-]+>|\.\.\.": "a reader fills something in",
}
"""Commands that are shown but not run, by a pattern, with the reason."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: Path
    line: int
    text: str

    @property
    def not_run(self) -> str:
        return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, self.text)), "")

    @property
    def exit_code(self) -> int:
        """What the page says of it: `# exit code 1`."""
        said = EXIT_CODE.search(self.text)
        return 0 if said is None else int(said[1])


def commands(page: Path) -> Iterator[Command]:
    """The lines of shell blocks; in `console` blocks those after a prompt, the others being output."""
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        if fence[1] not in SHELL:
            continue
        for found in re.finditer(r"(?:\\\n|.)+", fence[2]):
            line = text.count("\n", 0, fence.start(2) + found.start()) + 1
            words = re.sub(r"\s*\\\n\s*", " ", found[0])
            if fence[1] == "console":
                if not words.startswith("$ "):
                    continue
                words = words.removeprefix("$ ")
            if words.strip() and not words.startswith("#"):
                yield Command(page, line, words.strip())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader would stand: the guide's port beside the examples, a known failure, and a checkout's folders."""
    port = next(
        code for language, code in FENCE.findall((ROOT / "docs" / "guide.md").read_text()) if language == "python"
    )
    (tmp_path / "my_port.py").write_text(port)
    for example in (ROOT / "ci" / "examples").iterdir():
        (shutil.copytree if example.is_dir() else shutil.copy)(example, tmp_path / example.name)
    # The one line of configuration of docs/ci.md.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --conformance my_port:Port\n")
    for name in ("ci", "conformance", "fixtures"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "conformance.toml").write_text(
        '[[expect]]\npattern = "engram/*"\nstatus = "unsupported"\nreason = "later"\nurl = "https://example.org/1"\n'
    )
    return tmp_path


def run(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GITHUB_"))}
    programs = str(Path(sys.executable).parent)
    return subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env={**kept, "PATH": f"{programs}{os.pathsep}{kept['PATH']}", "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.timeout(900)
def test_commands_of(page: Path, folder: Path) -> None:
    problems = []
    for command in commands(page):
        if command.not_run:
            continue
        done = run(command, folder)
        if done.returncode != command.exit_code:
            said = (done.stderr or done.stdout).strip().splitlines()[-3:]
            problems.append(f"{page.name}:{command.line}: {command.text}: exit code {done.returncode}: {said}")
    assert problems == []


def test_commands_are_found() -> None:
    found = {page.stem: list(commands(page)) for page in PAGES}
    for page in ("guide", "ci", "adding-a-case", "gpu-runner"):
        assert found[page]
    assert sum(not command.not_run for page in found.values() for command in page) > 20


def test_what_is_found_and_what_is_expected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ntrue a \\\n  b\nfalse   # exit code 1\n# a remark\n```\n\n```python\nexit()\n```\n"
        "```console\n$ exit 3\noutput\n```\n"
    )
    found = list(commands(page))
    assert [(command.line, command.text, command.exit_code) for command in found] == [
        (2, "true a b", 0),
        (4, "false   # exit code 1", 1),
        (12, "exit 3", 0),
    ]
    assert [run(command, tmp_path).returncode for command in found] == [0, 1, 3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page: Path) -> None:
    """Files that a page refers to are there, pictures included."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_run_name_what_there_is(page: Path) -> None:
    """`make` targets exist, whether or not the tests run them."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        made = re.match(r"make((?: [a-z]+)+)", command.text)
        if made is not None:
            assert set(made[1].split()) <= targets, command.text
