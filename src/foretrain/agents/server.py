"""Serves the tools over the Model Context Protocol on stdin and stdout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from foretrain import __version__
from foretrain.agents.terms import Terms
from foretrain.agents.tools import INSTRUCTIONS, TOOLS
from foretrain.report import dump

_LONGEST_QUESTION = 1_000_000
"""Bytes of the arguments of a call."""
_LONGEST_REPLY = 16_000_000
"""Bytes."""

_PATHS = ("PYTHONPATH", "FORETRAIN_CACHE", "FORETRAIN_CATALOG", "FORETRAIN_DATA")
"""Variables that name folders and files."""


def serve(terms: Terms) -> None:
    """Answer until stdin ends."""
    anyio.run(_serve, terms)


async def _serve(terms: Terms) -> None:
    async with ToolProcess.begun(terms) as worker, anyio.create_task_group() as tasks:
        tasks.start_soon(_end_on_signal, worker)
        async with stdio_server() as (received, sent):
            server = make_server(worker)
            await server.run(received, sent, server.create_initialization_options())
        tasks.cancel_scope.cancel()


async def _end_on_signal(worker: ToolProcess) -> None:
    """End on Ctrl-C and SIGTERM at once: the thread that waits for stdin would keep the process until it
    ends."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            await worker.close()
            os._exit(128 + number)


def make_server(worker: ToolProcess) -> Server[Any]:
    """The server of the tools, each call of which is answered by the worker."""

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(name) for name in TOOLS])

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return _result(await worker.ask(params.name, params.arguments or {}))

    return Server(
        "foretrain",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _described(name: str) -> types.Tool:
    tool = TOOLS[name]
    unchanging = types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    return types.Tool(name=name, description=tool.words, input_schema=tool.schema(), annotations=unchanging)


def _result(reply: dict[str, Any]) -> types.CallToolResult:
    """The text, and the data both as JSON text and as they are: clients show a model one or the other."""
    if "error" in reply:
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=reply["error"])], is_error=True
        )
    texts = (reply["text"], dump(reply["data"], indent=None))
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text) for text in texts],
        structured_content=reply["data"],
    )


class ToolProcess:
    """The process that answers, one question at a time; ended and begun anew where a question takes longer
    than the terms allow."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._empty = tempfile.TemporaryDirectory(prefix="foretrain-")
        self._folder = self._empty.name if terms.folder is None else str(terms.folder.resolve())
        self._turn = anyio.Lock()
        self._process: anyio.abc.Process | None = None
        self._replies: BufferedByteReceiveStream | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def begun(cls, terms: Terms) -> AsyncIterator[ToolProcess]:
        """Begin a process in the folder that is open to it, or in an empty one, where no name is that of a
        file."""
        worker = cls(terms)
        try:
            yield worker
        finally:
            await worker.close()

    async def ask(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        question = json.dumps({"tool": tool, "arguments": arguments}).encode() + b"\n"
        if len(question) > _LONGEST_QUESTION:
            return {"error": f"arguments: {len(question):,} bytes are more than {_LONGEST_QUESTION:,}"}
        async with self._turn:
            try:
                with anyio.fail_after(self._terms.seconds):
                    return dict(json.loads(await self._exchange(question)))
            except TimeoutError:
                await self.end()
                limit = f"{self._terms.seconds:g} s"
                return {"error": f"{tool}: took longer than {limit} and was ended; foretrain mcp --seconds"}
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                await self.end()
                return {"error": f"{tool}: the process that forecasts ended; it may have run out of memory"}
            except BaseException:  # a call that was cancelled: its answer must not be the next one's
                await self.end()
                raise

    async def _exchange(self, question: bytes) -> bytes:
        if self._process is None:
            await self._begin()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._replies is not None
        await self._process.stdin.send(question)
        return await self._replies.receive_until(b"\n", _LONGEST_REPLY)

    async def _begin(self) -> None:
        terms = [str(self._terms.seconds), *([] if self._terms.folder is None else [self._folder])]
        self._process = await anyio.open_process(
            [sys.executable, "-P", "-m", "foretrain.agents.worker", *terms],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            cwd=self._folder,
            env=_environment(),
        )
        assert self._process.stdout is not None
        self._replies = BufferedByteReceiveStream(self._process.stdout)

    async def close(self) -> None:
        await self.end()
        self._empty.cleanup()

    async def end(self) -> None:
        """The next question begins another process."""
        process, self._process, self._replies = self._process, None, None
        if process is None:
            return
        with anyio.CancelScope(shield=True), contextlib.suppress(ProcessLookupError):
            process.kill()
            await process.aclose()


def _environment() -> dict[str, str]:
    """Set the environment of a process in another folder: paths as they are meant in this one, and no model
    hub."""
    paths = {
        name: os.pathsep.join(str(Path(one).resolve()) for one in os.environ[name].split(os.pathsep) if one)
        for name in _PATHS
        if name in os.environ
    }
    return {**os.environ, **paths, "HF_HUB_OFFLINE": "1"}
