"""A hub on this machine: the few answers that huggingface_hub needs to download a model, and faults on request.

``GET /api/models/<repo>[/revision/<rev>]`` and ``GET /api/models/<repo>/tree/<commit>`` describe a repository;
``HEAD`` and ``GET /<repo>/resolve/<rev>/<file>`` give a file, in parts too.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")


@dataclass
class HubServer:
    """Serves from memory, on the loopback interface, between ``__enter__`` and ``__exit__``.

    Attributes:
        repositories: Files by their name, by repository.
        revisions: Commit by branch or tag; besides them each commit is a revision.
        gated: Repositories that need a token.
        cut_after: File name -> bytes after which the first transfer of it is cut.
        broken: Files whose every transfer is cut at once.
        claimed_sizes: File name -> size that the description claims.
        log: Method, path and range of each request, in order.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self) -> list[str]:
        """Names of the files whose contents were asked for, in order."""
        paths = (match for method, path, _ in self.log if method == "GET" and (match := _RESOLVE.fullmatch(path)))
        return [match[3] for match in paths]

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.revisions.values() else self.revisions.get(revision)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        for pattern, answer in ((_RESOLVE, self._file), (_TREE, self._tree), (_INFO, self._info)):
            match = pattern.fullmatch(path)
            if match is not None:
                return answer(match)
        return self._error(404, "EntryNotFound")

    def _files(self, match: re.Match[str]) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of what was asked for; None once it has been refused."""
        if match[1] in self.hub.gated and "Authorization" not in self.headers:
            return self._error(401, "GatedRepo")
        if match[1] not in self.hub.repositories:
            return self._error(404, "RepoNotFound")
        commit = self.hub.commit(match[2] or "main")
        if commit is None:
            return self._error(404, "RevisionNotFound")
        return commit, self.hub.repositories[match[1]]

    def _info(self, match: re.Match[str]) -> None:
        found = self._files(match)
        if found is not None:
            siblings = [{"rfilename": name, "size": self._size(name, data)} for name, data in found[1].items()]
            self._json({"id": match[1], "sha": found[0], "siblings": siblings, "private": False, "tags": []})

    def _tree(self, match: re.Match[str]) -> None:
        found = self._files(match)
        if found is not None:
            self._json(
                [
                    {"type": "file", "path": name, "size": self._size(name, data), "oid": _etag(data)}
                    for name, data in found[1].items()
                ]
            )

    def _file(self, match: re.Match[str]) -> None:
        found = self._files(match)
        if found is None:
            return None
        commit, files = found
        if match[3] not in files:
            return self._error(404, "EntryNotFound")
        data = files[match[3]]
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            self._send(match[3], data[start:])
        return None

    def _send(self, name: str, data: bytes) -> None:
        limit = 0 if name in self.hub.broken else self.hub.cut_after.pop(name, None)
        self.wfile.write(data[:limit])
        if limit is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _size(self, name: str, data: bytes) -> int:
        return self.hub.claimed_sizes.get(name, len(data))

    def _json(self, value: Any, status: int = 200, code: str = "") -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._json({"error": code}, status, code)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
