"""What Hugging Face's hub answers where a model is fetched from it: one model, on a loopback port."""

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Serves `files` as `repo` at `main` and `v1`; with `gated` only lists them; those `lost` cannot be downloaded."""

    repo: str
    files: Mapping[str, bytes]
    gated: bool = False
    lost: frozenset[str] = frozenset()
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        if not path.startswith((f"/api/models/{self.repo}/", f"/{self.repo}/resolve/")):
            return 404, {"X-Error-Code": "RepoNotFound"}, b"no such model"
        if path.startswith("/api/"):
            kind, _, revision = path.removeprefix(f"/api/models/{self.repo}/").partition("/")
            return self._listing(kind, revision)
        revision, _, file = path.removeprefix(f"/{self.repo}/resolve/").partition("/")
        if self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"gated"
        if revision != self.commit or file not in self.files or file in self.lost:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"no such file"
        data = self.files[file]
        return 200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.commit}, data

    def _listing(self, kind: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        if revision not in ("main", "v1", self.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"no such revision"
        if kind == "tree":
            listed: object = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
        else:
            names = [{"rfilename": name} for name in self.files]
            listed = {"id": self.repo, "sha": self.commit, "siblings": names}
        return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()


@contextmanager
def serving(hub: Hub) -> Generator[Hub]:
    """Answer for `hub` until the block ends; its `endpoint` is what HF_ENDPOINT must be."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are kept in `hub.requests`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
