"""The stock client's command line and SDK in one process of its environment: importing it takes seconds.

Reads one request a line, `{"call": "command" | "flow", "words": [...], "environment": {...}}`, and answers
each with `{"code": 0, "output": ..., "error": ...}`.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any

import cortex_training._cli  # pyright: ignore[reportMissingImports]
from stock_flow import connect, flow  # pyright: ignore[reportMissingImports]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for; nothing of its environment stays."""
    output, error = io.StringIO(), io.StringIO()
    before = dict(os.environ)
    os.environ.update(request["environment"])
    code = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            if request["call"] == "command":
                code = cortex_training._cli.main(request["words"])
            else:
                output.write(json.dumps(flow(connect(request["words"]))))
    except (Exception, SystemExit):  # noqa: BLE001 - the test judges
        code = 1
        error.write(traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {"code": code, "output": output.getvalue(), "error": error.getvalue()}


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
