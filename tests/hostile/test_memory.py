"""Bodies made to take memory: what all of them together may hold is bounded, and every one is answered."""
import pathlib
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from conftest import start, wait_until  # noqa: E402,F401

TEXT = "/v1/completions"
MIB = 1 << 20


def resident(server):
    for line in pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


class Peak:
    """The most that is resident while the block runs, above what was resident before it."""

    def __init__(self, server):
        self.server, self.bytes, self.stop = server, 0, threading.Event()

    def __enter__(self):
        self.idle = resident(self.server)
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.stop.is_set():
            self.bytes = max(self.bytes, resident(self.server) - self.idle)
            time.sleep(0.01)

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


def amplifier(field, size):
    """A body of `size` bytes whose document would take some sixty times as much."""
    head, tail = b'{"prompt": "Hi", "max_tokens": 1, "temperature": 0, "%s": [' % field, b"[]]}"
    return head + b"[]," * ((size - len(head) - len(tail)) // 3) + tail


def send(server, data, out):
    head = (f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode()
    answer = b""
    try:
        with server.connect() as sock:
            sock.settimeout(240)
            sock.sendall(head)
            sock.sendall(data)
            while piece := sock.recv(65536):
                answer += piece
    except ConnectionError:
        pass  # refused before all of it was sent; the answer may have come
    out.append(answer)


def send_all(server, data, count):
    answers = []
    threads = [threading.Thread(target=send, args=(server, data, answers)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_many_amplifying_bodies_at_once(start):
    server = start("--max-body", "17MiB").ready()
    assert server.post(TEXT, {"prompt": "Hi", "max_tokens": 1}).status_code == 200
    data = amplifier(b"metadata", 16_500_000)
    begin = time.monotonic()
    with Peak(server) as peak:
        answers = send_all(server, data, 64)
    took = time.monotonic() - begin
    statuses = sorted(int(answer.split()[1]) for answer in answers if answer)
    print(f"64 bodies of {len(data)} bytes: {took:.1f} s, peak {peak.bytes / MIB:.0f} MiB above idle, "
          f"{statuses.count(200)} x 200, {statuses.count(503)} x 503")
    assert len(statuses) == 64, "every one is answered"
    assert set(statuses) <= {200, 503} and statuses.count(200) > 0
    assert all(b"Retry-After: " in answer for answer in answers if b" 503 " in answer[:20])
    assert peak.bytes < 256 * MIB
    # And the memory goes back, but for pages of the engine's cache and what the allocator keeps per thread.
    assert wait_until(lambda: resident(server) - peak.idle < 128 * MIB, 15), resident(server) - peak.idle
    assert server.post(TEXT, {"prompt": "Hi", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("field", [b"stop", b"logit_bias", b"prompt", b"response_format"])
def test_amplifying_fields_that_are_read(start, field):
    server = start("--max-body", "17MiB").ready()
    data = amplifier(field, 16_500_000)
    with Peak(server) as peak:
        answers = send_all(server, data, 8)
    assert [int(answer.split()[1]) for answer in answers] == [400] * 8
    assert all(b'"error"' in answer for answer in answers)
    assert peak.bytes < 256 * MIB, peak.bytes


def test_broken_amplifiers(start):
    """Not JSON at the very end: no document was built on the way there."""
    server = start("--max-body", "17MiB").ready()
    with Peak(server) as peak:
        answers = send_all(server, amplifier(b"prompt", 16_500_000)[:-2] + b"??", 4)
    assert [int(answer.split()[1]) for answer in answers] == [400] * 4
    assert peak.bytes < 256 * MIB, peak.bytes


def test_claims_take_nothing(start):
    """Clients that claim the largest body and send a little of it keep nobody waiting."""
    server = start().ready()
    held = []
    with Peak(server) as peak:
        for _ in range(200):
            sock = server.connect()
            sock.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         f"Content-Length: {16 * MIB}\r\n\r\n".encode() + b'{"prompt": "')
            held.append(sock)
        begin = time.monotonic()
        assert server.post(TEXT, {"prompt": "x " * 200_000, "max_tokens": 1}).status_code == 400  # too long for it
        assert server.post(TEXT, {"prompt": "Hi", "max_tokens": 1}).status_code == 200
        assert time.monotonic() - begin < 10
    assert peak.bytes < 64 * MIB, peak.bytes
    for sock in held:
        sock.close()
