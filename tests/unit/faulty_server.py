"""An HTTP server of a folder that misbehaves as it is told, at seeded random."""

from __future__ import annotations

import contextlib
import gzip
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    """What it was asked for is counted, and how it answers may be changed at any time."""

    daemon_threads = True

    def __init__(self, root: Path, **faults: object) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, root=root))
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.random, self.asked, self.sent = random.Random(0), Counter(), Counter()
        self.cut = self.refuse = 0.0
        """Share of the answers with a body that end half-way, and of those that are refused."""
        self.statuses, self.ranges, self.retry_after = [503], True, None
        self.hangs, self.etag = False, "1"
        self.__dict__.update(faults)

    def handle_error(self, request, address) -> None:
        """Clients of a cut answer close the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args, root: Path) -> None:
        self.root = root
        super().__init__(*args)

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        server, path = self.server, self.root / self.path.lstrip("/")
        server.asked[path.name] += not is_head
        if server.random.random() < server.refuse:
            return self._send(server.random.choice(server.statuses), b"")
        if not path.is_file():
            return self._send(404, b"")
        if server.hangs:
            self.rfile.read(1)  # until the client closes the connection
            return None
        content, status, headers = path.read_bytes(), 200, {}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found and server.ranges:
            begin, end = int(found[1]), int(found[2]) + 1
            if begin >= len(content):
                return self._send(416, b"")
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            content, status = content[begin:end], 206
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            # As some servers do, whatever range was asked for.
            headers, content, status = (
                {"Content-Encoding": "gzip"},
                gzip.compress(path.read_bytes()),
                200,
            )
        if server.etag:
            headers["ETag"] = f'"{server.etag}"'
        self._send(status, content, headers, is_head=is_head)

    def _send(self, status, content, headers=(), *, is_head=False) -> None:
        server = self.server
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if status in (429, 503) and server.retry_after is not None:
            self.send_header("Retry-After", server.retry_after)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if is_head:
            return
        is_cut = len(content) > 1 and server.random.random() < server.cut
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        server.sent[Path(self.path).name] += len(content)
        self.close_connection |= is_cut


@contextlib.contextmanager
def serving(root: Path, **faults: object) -> Iterator[Server]:
    """Serve a folder while the block runs."""
    with Server(root, **faults) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
