"""Requests that two parties may read in two ways (RFC 9112), and clients that end one side of a connection early."""
import json
import pathlib
import socket
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from conftest import http_request, server, wait_until  # noqa: E402,F401

TEXT = "/v1/completions"
BODY = json.dumps({"prompt": "Hi", "max_tokens": 1, "temperature": 0}).encode()
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def talk(running, data, end=False):
    """Everything that comes back until the server closes."""
    with running.connect() as sock:
        sock.settimeout(30)
        sock.sendall(data)
        if end:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
    return answer


def post(headers, body):
    return b"POST " + TEXT.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + headers + b"\r\n" + body


def chunk(size=None, end=b"\r\n", extension=b""):
    size = b"%x" % len(BODY) if size is None else size
    return size + extension + b"\r\n" + BODY + end + b"0\r\n\r\n"


HEX = b"%x" % len(BODY)
REFUSED = {
    "space before the colon": post(b"Transfer-Encoding : chunked\r\n", chunk()),
    "folded Transfer-Encoding": post(b"Transfer-Encoding:\r\n chunked\r\n", chunk()),
    "folded by a tab": post(CHUNKED + b"X: a\r\n\tb\r\n", chunk()),
    "two Transfer-Encodings": post(CHUNKED + CHUNKED, chunk()),
    "two codings": post(b"Transfer-Encoding: gzip, chunked\r\n", chunk()),
    "another coding first": post(b"Transfer-Encoding: identity\r\n" + CHUNKED, chunk()),
    "length and chunks": post(CHUNKED + b"Content-Length: 4\r\n", chunk()),
    "two equal lengths": post(b"Content-Length: %d\r\n" % len(BODY) * 2, BODY),
    "a list of lengths": post(b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY)), BODY),
    "a signed length": post(b"Content-Length: +%d\r\n" % len(BODY), BODY),
    "NUL in a name": post(b"Content-Length: %d\r\nA\0b: c\r\n" % len(BODY), BODY),
    "NUL in a value": post(b"Content-Length: %d\r\nA: b\0c\r\n" % len(BODY), BODY),
    "a line without a colon": post(b"Content-Length: %d\r\nnonsense\r\n" % len(BODY), BODY),
    "a bare CR": post(b"Content-Length: %d\r\nA: b\rc: d\r\n" % len(BODY), BODY),
    "a bare LF": post(b"Content-Length: %d\r\nA: b\nC: d\r\n" % len(BODY), BODY),
    "chunk size 0x": post(CHUNKED, chunk(b"0x" + HEX)),
    "chunk size +": post(CHUNKED, chunk(b"+" + HEX)),
    "chunk size with letters": post(CHUNKED, chunk(HEX + b"zz")),
    "chunk size after a space": post(CHUNKED, chunk(b" " + HEX)),
    "chunk size by a bare LF": post(CHUNKED, HEX + b"\n" + BODY + b"\r\n0\r\n\r\n"),
    "an extension that holds a line": post(CHUNKED, chunk(extension=b';a="\n"')),
    "chunk data ended by other bytes": post(CHUNKED, chunk(end=b"XX")),
    "chunk data ended by LF": post(CHUNKED, chunk(end=b"\n")),
    "chunks in HTTP/1.0": post(CHUNKED, chunk()).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_closed(server, name):
    answer = talk(server, REFUSED[name] + SMUGGLED)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 "), answer[:300]
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert answer.count(b"HTTP/1.1") == 1, "what followed was taken for a request"


@pytest.mark.parametrize("data", [
    post(CHUNKED, chunk()),
    post(CHUNKED, chunk(extension=b";name=value")),
    post(CHUNKED, chunk(b"000" + HEX.upper())),
    post(CHUNKED, chunk()[:-2] + b"Trailer: x\r\n\r\n"),
    post(b"transfer-encoding:chunked\r\n", chunk()),
    post(b"Content-Length: %d\r\n" % len(BODY), BODY),
])
def test_accepted(server, data):
    """The same things in their right form; the connection goes on."""
    answer = talk(server, data + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2, answer[:500]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_answer(server, stream):
    """As `nc -N` does: the request, then the end of what it sends."""
    fields = {"prompt": "The sea", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": stream}
    answer = talk(server, http_request(TEXT, fields), end=True)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:200]
    assert (b"data: [DONE]" if stream else b'"text_completion"') in answer
    assert talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2, end=True).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_is_cancelled(server, stream):
    """The same end of its side, but nobody is there."""
    before = server.metrics()["oscar_cancelled_total"]
    sock = server.connect()
    sock.sendall(http_request(TEXT, {"prompt": "The sea", "max_tokens": 3000, "ignore_eos": True, "stream": stream}))
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 1)
    sock.close()
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 0, 3)
    assert server.metrics()["oscar_cancelled_total"] == before + 1


def test_connection_is_a_list(server):
    answer = talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: foo, close\r\n\r\n" + SMUGGLED)
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("value", ["bytes=0-1", "bytes=9-2", "bytes", "bytes=-", "bytes=a-b", "=", "bytes=0-0,5-4"])
def test_ranges_are_ignored(server, value):
    answer = server.get("/health", headers={"Range": value})
    assert answer.status_code == 200 and answer.json() == {"status": "ok"}


def test_expect_continue(server):
    with server.connect() as sock:
        sock.settimeout(30)
        sock.sendall(post(b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(BODY), b""))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
    refused = talk(server, b"POST /nothing HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 404")
