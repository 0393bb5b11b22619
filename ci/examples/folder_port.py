"""Answers a folder of questions with the numpy port, case by case.

conformance export questions
python ci/examples/folder_port.py questions
conformance check dir:questions
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "numpy_port"))

import harness
import port


def answer_case(folder, case_id):
    """Run the commands of a case, up to the first that is not supported, and write results and replies."""
    conversation = port.Conversation(folder)
    commands = (folder / "cases" / case_id / "commands.jsonl").read_text(encoding="utf-8").splitlines()
    answers = folder / "results" / case_id
    answers.mkdir(parents=True, exist_ok=True)
    replies = []
    for command in commands:
        replies.append(harness.reply_to(json.loads(command), conversation))
        if replies[-1]["status"] != "ok":
            break
    (answers / "replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies), encoding="utf-8")


def main(folder):
    """Answer every case whose methods the port has, and say who answers."""
    port.quiet()
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / "describe.json").write_text(json.dumps(port.DESCRIPTION), encoding="utf-8")
    for case in manifest["cases"]:
        if set(case["methods"]) <= set(port.DESCRIPTION["methods"]):
            answer_case(folder, case["id"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
