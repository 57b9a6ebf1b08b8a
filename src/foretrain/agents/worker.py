"""Answers the questions of a server, one JSON line each, in a process that can be ended when one takes too
long: ``python -m foretrain.agents.worker SECONDS [FOLDER]``, begun in that folder or an empty one."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from foretrain.agents.terms import Terms
from foretrain.agents.tools import reply
from foretrain.errors import ForetrainError, first_line, libraries_named
from foretrain.report import dump


def answer(line: str, terms: Terms) -> str:
    """JSON with the text and data of a reply, or an error in one line; of a bug the traceback goes to
    stderr."""
    question = json.loads(line)
    tool, given = question["tool"], question["arguments"]
    try:
        with libraries_named(tool):
            answered = reply(tool, given, terms)
        return dump({"text": answered.text, "data": dict(answered.data)}, indent=None)
    except ForetrainError as error:
        why = " ".join(str(error).splitlines())
    except Exception as error:
        traceback.print_exc()
        why = f"{tool}: internal error: {type(error).__name__}: {first_line(error)}"
    return dump({"error": why}, indent=None)


def main(seconds: str, folder: str | None = None) -> None:
    terms = Terms(seconds=float(seconds), folder=None if folder is None else Path(folder))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what models print must not be among the replies
    for line in sys.stdin:
        replies.write(answer(line, terms) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
