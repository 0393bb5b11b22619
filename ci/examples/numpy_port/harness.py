"""The numpy port as a process: a command a line on standard input, a reply a line on standard output.

conformance check "cmd:python ci/examples/numpy_port/harness.py"
"""

import json
import sys
from pathlib import Path

import port
import tensor_files
from attention import Unsupported


def reply_to(message, conversation):
    """The reply to a command; results have been written to the file that it names."""
    reply = {"seq": message["seq"], "status": "ok"}
    try:
        if message["command"] == "describe":
            reply["description"] = port.DESCRIPTION
        elif message["command"] == "run":
            results = conversation.run(message["request"])
            if results:
                tensor_files.write(Path(conversation.folder, message["results"]), results)
            reply["results"] = {name: {} for name in results}
    except Unsupported as reason:
        reply.update(status="unsupported", message=str(reason))
    except Exception as error:
        reply.update(status="error", message=f"{type(error).__name__}: {error}")
    return reply


def main():
    """Answer commands until `stop` or the end of the input."""
    port.quiet()
    conversation = port.Conversation()
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps(reply_to(message, conversation)), flush=True)
        if message["command"] == "stop":
            break


if __name__ == "__main__":
    main()
