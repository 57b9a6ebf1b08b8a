"""Posts a recorded run to a server of foretrain; the run is kept here first, so nothing is lost without
one."""

from __future__ import annotations

import logging
import os
from typing import Self, final

from foretrain.client import Client
from foretrain.errors import first_line
from foretrain.run import Run

log = logging.getLogger("foretrain.callbacks")

SERVER = "FORETRAIN_SERVER"
"""The variable of the environment with the URL of a server."""
_PATIENCE_S = 10.0
"""A training that has ended does not wait longer than this."""


@final
class Posting:
    """A server that gets runs; what it asks of those who write is in $FORETRAIN_TOKEN."""

    def __init__(self, url: str) -> None:
        Client(url)  # what is wrong with a URL shows before the training
        self.url = url

    @classmethod
    def to(cls, server: str | None) -> Self | None:
        """The server that is named here or in the environment, if any is."""
        url = server or os.environ.get(SERVER)
        return cls(url) if url else None

    def post(self, run: Run, kept: str | None) -> bool:
        """Whether the server has the run now; where it has not, the log says where the run is."""
        try:
            Client(self.url, timeout_s=_PATIENCE_S).add_runs([run])
        except Exception as error:
            where = f"it is kept in {kept}" if kept else "the log has it"
            log.warning("the run was not posted (%s); %s", first_line(error), where)
            return False
        return True
