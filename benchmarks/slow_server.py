"""A server of objects that answers each request late, as a bucket far away does.

It speaks as much of S3 and HTTP as reading needs: GET with a range, and HEAD. One process, so that
its CPU time is that of no client; each answer waits by itself, so many requests wait at once.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import unquote

MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


@contextmanager
def slow_server(folder: Path, delay_s: float) -> Iterator[tuple[int, Connection]]:
    """Serve a folder; the port, and a pipe that answers any message with the requests so far."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(folder, delay_s, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv(), ours
    finally:
        process.terminate()
        process.join()


def _serve(folder: Path, delay_s: float, pipe: Connection) -> None:
    asyncio.run(_run({path.name: path.read_bytes() for path in folder.iterdir()}, delay_s, pipe))


async def _run(files: dict[str, bytes], delay_s: float, pipe: Connection) -> None:
    asked = [0, 0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await answer_all(reader, writer)
        writer.close()

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            line, *lines = head.decode("latin-1").split("\r\n")
            method, path, _version = line.split(" ")
            headers = {name.lower(): value for name, _colon, value in (one.partition(": ") for one in lines)}
            data = files.get(unquote(path.partition("?")[0]).rpartition("/")[2])
            await asyncio.sleep(delay_s)
            if data is None:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            first, end, status, more = 0, len(data), "200 OK", ""
            if "range" in headers:
                low, _dash, high = headers["range"].removeprefix("bytes=").partition("-")
                first, end = int(low), min(len(data), int(high) + 1)
                status, more = "206 Partial Content", f"Content-Range: bytes {first}-{end - 1}/{len(data)}\r\n"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {end - first}\r\n{more}Accept-Ranges: bytes\r\n"
                f'ETag: "{len(data)}"\r\nLast-Modified: {MODIFIED}\r\n\r\n'.encode()
            )
            if method == "GET":
                asked[0] += 1
                asked[1] += end - first
                writer.write(memoryview(data)[first:end])
            await writer.drain()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        pipe.send(server.sockets[0].getsockname()[1])
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: (pipe.recv(), pipe.send(tuple(asked))))
        await server.serve_forever()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
