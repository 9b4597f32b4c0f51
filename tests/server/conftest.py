"""The real server on the demo model, driven from outside. OSCAR_BIN names the program; ctest sets it."""
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("OSCAR_BIN", str(ROOT / "build/release/oscar"))
DEMO = ROOT / "models/demo"


class Server:
    """One process. Starts at once; `ready()` waits for the line that says so."""

    def __init__(self, *args, model=DEMO, env=None):
        command = [BINARY, "serve", "--model", model, "--port", 0, "--kv-memory", "256MiB", *args]
        self.process = subprocess.Popen(
            [str(part) for part in command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines = []
        self.port = None
        self._port_known = threading.Event()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            match = re.search(r"https?://[^ ]*:(\d+)", line)
            if match and self.port is None:
                self.port = int(match.group(1))
                self._port_known.set()
            if "oscar: ready" in line:
                self._ready.set()
        self._port_known.set()
        self._ready.set()

    def listening(self):
        assert self._port_known.wait(60) and self.port, self.lines
        return self

    def ready(self):
        assert self._ready.wait(120) and any("oscar: ready" in line for line in self.lines), self.lines
        return self

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self, **kwargs):
        return httpx.Client(base_url=self.url, timeout=120, **kwargs)

    def get(self, path, **kwargs):
        with self.client() as client:
            return client.get(path, **kwargs)

    def post(self, path, body=None, **kwargs):
        with self.client() as client:
            return client.post(path, **({"json": body} if body is not None else {}), **kwargs)

    def chat(self, content="What is the capital of France?", **fields):
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
        return self.post("/v1/chat/completions", {**body, **fields})

    def stream(self, path="/v1/chat/completions", headers=None, **fields):
        """Every data frame as JSON, after checking the framing; comments are dropped."""
        with self.client() as client:
            with client.stream("POST", path, json={**fields, "stream": True}, headers=headers) as response:
                assert response.status_code == 200, response.read()
                raw = b"".join(response.iter_raw())
        return parse_events(raw)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def metrics(self):
        values = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def stop(self):
        if self.process.poll() is None:
            self.signal()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise AssertionError("the server did not stop")
        return self.process.wait(10)


def parse_events(raw):
    frames = raw.split(b"\n\n")
    assert frames[-1] == b"", "the last frame is not ended"
    frames = [frame for frame in frames[:-1] if frame != b": ping"]
    assert frames[-1] == b"data: [DONE]"
    events = []
    for frame in frames[:-1]:
        assert frame.startswith(b"data: ") and b"\n" not in frame, frame
        events.append(json.loads(frame[6:]))
    return events


def http_request(path, body, headers=""):
    data = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(data)}\r\n\r\n")
    return head.encode() + data


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="session")
def server():
    running = Server("--max-model-len", 4096).ready()
    yield running
    assert running.stop() == 0, running.lines[-5:]


@pytest.fixture
def start():
    """Starts servers of a test's own; all are gone when it ends."""
    started = []

    def begin(*args, **kwargs):
        started.append(Server(*args, **kwargs))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(10)
