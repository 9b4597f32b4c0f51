"""HTTPS with a certificate that the test makes."""
import json
import socket
import ssl
import subprocess

import httpx
import pytest

from conftest import BINARY, DEMO, http_request, parse_events

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout",
                        folder / f"{name}.key", "-out", folder / f"{name}.crt", "-subj", "/CN=localhost", "-addext",
                        "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def secure(pem):
    from conftest import Server
    running = Server("--tls-cert", pem / "one.crt", "--tls-key", pem / "one.key", "--api-key", "k").ready()
    assert any(f"https://127.0.0.1:{running.port}" in line for line in running.lines)
    yield running
    assert running.stop() == 0, running.lines[-5:]


def client(secure, pem):
    return httpx.Client(base_url=f"https://127.0.0.1:{secure.port}", verify=str(pem / "one.crt"), timeout=120,
                        headers={"Authorization": "Bearer k"})


def test_httpx(secure, pem):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    with client(secure, pem) as http:
        assert http.get("/health").status_code == 200
        whole = http.post(CHAT, json=body)
        assert whole.status_code == 200
        with http.stream("POST", CHAT, json={**body, "stream": True}) as response:
            events = parse_events(b"".join(response.iter_raw()))
        said = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        assert said == whole.json()["choices"][0]["message"]["content"]
        large = http.post("/tokenize", json={"prompt": "word " * 200_000})
        assert large.status_code == 200 and large.json()["count"] > 100_000


def test_curl(secure, pem):
    run = subprocess.run(["curl", "-sS", "--cacert", pem / "one.crt", "-H", "Authorization: Bearer k", "-w", "%{http_version}",
                          f"https://localhost:{secure.port}/v1/models"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout[:-3])["object"] == "list" and run.stdout.endswith("1.1")


def connect(secure, **kwargs):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for name, value in kwargs.items():
        setattr(context, name, value)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context.wrap_socket(socket.create_connection(("127.0.0.1", secure.port), timeout=30))


def test_versions_and_alpn(secure):
    with connect(secure) as sock:
        assert sock.version() in ("TLSv1.2", "TLSv1.3") and sock.selected_alpn_protocol() == "http/1.1"
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b'{"status":"ok"}')
    with pytest.raises((ssl.SSLError, ConnectionError)):
        connect(secure, minimum_version=ssl.TLSVersion.TLSv1_1, maximum_version=ssl.TLSVersion.TLSv1_1)


def test_a_client_that_leaves_is_cancelled(secure, pem):
    with client(secure, pem) as http:
        def running():
            return float(next(line.split()[1] for line in http.get("/metrics").text.splitlines()
                              if line.startswith("oscar_requests_running ")))
        from conftest import wait_until
        sock = connect(secure)
        sock.sendall(http_request("/v1/completions", {"prompt": "The sea", "max_tokens": 3000, "ignore_eos": True},
                                  "X-Api-Key: k\r\n"))
        assert wait_until(lambda: running() == 1)
        sock.close()
        assert wait_until(lambda: running() == 0, 3)


def test_plain_http_and_noise_on_a_tls_port(secure, pem):
    for data in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + bytes(500), b""):
        with socket.create_connection(("127.0.0.1", secure.port), timeout=30) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := sock.recv(4096):
                    answer += piece
            except ConnectionError:
                pass
            assert b"HTTP/1.1 2" not in answer
    with client(secure, pem) as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("certificate,key,named", [
    ("one.crt", None, "--tls-key"),
    (None, "one.key", "--tls-cert"),
    ("", "", "--tls-cert"),
    ("nothing.crt", "one.key", "nothing.crt"),
    ("one.crt", "nothing.key", "nothing.key"),
    ("one.key", "one.key", "BEGIN CERTIFICATE"),
    ("one.crt", "two.key", "two.key"),
    ("one.crt", "one.crt", "private key"),
])
def test_wrong_files(pem, certificate, key, named):
    command = [BINARY, "serve", "--model", str(DEMO), "--port", "0"]
    for option, name in (("--tls-cert", certificate), ("--tls-key", key)):
        if name is not None:
            command += [option, str(pem / name) if name else ""]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 2, run.stderr
    assert named in run.stderr and "listening" not in run.stderr
