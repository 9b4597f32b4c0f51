"""Start, stop, keys, disconnects, overload: what needs a server of its own."""
import json
import signal
import socket
import struct
import subprocess
import time

import pytest

from conftest import BINARY, DEMO, ROOT, Server, http_request, parse_events, wait_until

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "Tell me a long story."}], "stream": True, "ignore_eos": True,
        "max_tokens": 3000, "temperature": 1.0}


def read_until(sock, needle, seconds=30):
    data = b""
    sock.settimeout(seconds)
    while needle not in data:
        chunk = sock.recv(4096)
        if not chunk:
            break
        data += chunk
    return data


def test_loading_then_ok(start):
    server = start().listening()
    first = server.get("/health")
    assert first.status_code in (200, 503)
    if first.status_code == 503:
        assert first.json()["error"]["code"] == "loading"
    server.ready()
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/v1/health").status_code == server.get("/ping").status_code == 200
    assert server.stop() == 0


def test_port_in_use(server):
    run = subprocess.run([BINARY, "serve", "--model", str(DEMO), "--port", str(server.port)], capture_output=True,
                         text=True, timeout=60)
    assert run.returncode == 1
    assert "in use" in run.stderr


def test_dry_run():
    run = subprocess.run([BINARY, "serve", "--model", str(DEMO), "--kv-memory", "1GiB", "--dry-run", "--json"],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert plan["kv_budget_bytes"] == 1 << 30
    assert plan["conversations"] >= 5 * plan["conversations_bf16"] > 0


@pytest.mark.parametrize("bits, fit", [("2.25", 24), (None, 23)])  # two bits everywhere; the demo model's own map
def test_twenty_four_conversations_where_bf16_holds_four(bits, fit):
    """The bar: a budget of exactly 4 x 14,000 BF16 tokens, nothing shared, the last one being read."""
    bf16_token = 8 * 2 * 2 * 128 * 2  # layers, K and V, heads, dims, bytes
    run = subprocess.run([BINARY, "serve", "--model", str(DEMO), "--kv-memory", str(4 * 14000 * bf16_token), "--dry-run",
                          "--json", "--plan-tokens", "14000", *(["--bits", bits] if bits else [])], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert plan["conversation_tokens"] == 14000
    assert plan["conversations"] >= fit
    assert plan["conversations_bf16"] in (3, 4)  # 14,000 tokens do not fill whole pages


def test_auth_matrix(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# team\nfrom-file\n")
    server = start("--api-key", "one", "--api-key-file", keys, env={}).ready()
    for headers in ({}, {"Authorization": "Bearer two"}, {"Authorization": "one"}, {"X-Api-Key": "x"}):
        for path in ("/v1/models", "/metrics", "/props", "/v1/oscar/cache", "/nothing"):
            response = server.get(path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for headers in ({"Authorization": "Bearer one"}, {"X-Api-Key": "from-file"}):
        assert server.get("/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/"):
        assert server.get(path).status_code == 200
    with server.client() as client:
        assert client.options(CHAT).status_code == 204
    assert server.stop() == 0
    assert not any("one" in line and "key" in line and "key-" not in line for line in server.lines)


def test_key_from_the_environment(start):
    server = start(env={"OSCAR_API_KEY": "hidden"}).ready()
    assert server.get("/v1/models").status_code == 401
    assert server.get("/v1/models", headers={"Authorization": "Bearer hidden"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages(start, stream):
    server = start("--no-prefix-cache").ready()
    assert server.metrics()["oscar_kv_used_bytes"] == 0
    sock = server.connect()
    sock.sendall(http_request(CHAT, {**LONG, "stream": stream, "n": 2}))
    if stream:
        read_until(sock, b"data: ")
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 2)
    assert server.metrics()["oscar_kv_used_bytes"] > 0
    # A reset, not a farewell.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 0, 3)
    assert wait_until(lambda: server.metrics()["oscar_kv_used_bytes"] == 0, 3)
    assert server.metrics()["oscar_cancelled_total"] == 1


def test_queue_full(start):
    server = start("--max-num-seqs", 1, "--max-queue", 1).ready()
    held = []
    statuses = []
    for _ in range(4):
        sock = server.connect()
        sock.sendall(http_request(CHAT, LONG))
        held.append(sock)
        time.sleep(0.3)
    response = server.post(CHAT, {**LONG, "stream": False, "max_tokens": 1})
    assert response.status_code == 429, response.text
    assert response.json()["error"]["code"] == "queue_full"
    assert "retry-after" in response.headers
    for sock in held:
        sock.close()
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 0)
    assert server.chat(max_tokens=1).status_code == 200


def test_sigterm_drains(start):
    server = start().ready()
    sock = server.connect()
    sock.sendall(http_request(CHAT, {**LONG, "max_tokens": 150}))
    head = read_until(sock, b"data: ")
    server.signal()
    assert wait_until(lambda: server.get("/health").status_code == 503)
    assert server.get("/health").json()["error"]["code"] == "draining"
    refused = server.chat()
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    rest = head + read_until(sock, b"data: [DONE]\n\n", 60)
    assert b'"finish_reason":"length"' in rest and b'"error"' not in rest
    sock.close()
    assert server.process.wait(20) == 0


def test_shutdown_timeout_cancels(start):
    server = start("--shutdown-timeout", 1).ready()
    sock = server.connect()
    sock.sendall(http_request(CHAT, {**LONG, "max_tokens": 3000}))
    head = read_until(sock, b"data: ")
    begin = time.monotonic()
    server.signal()
    rest = head + read_until(sock, b"data: [DONE]\n\n", 30)
    assert b'"code":"draining"' in rest
    sock.close()
    assert server.process.wait(20) == 1
    assert time.monotonic() - begin < 15


def test_second_signal_kills(start):
    server = start().ready()
    sock = server.connect()
    sock.sendall(http_request(CHAT, LONG))
    read_until(sock, b"data: ")
    server.signal()
    assert wait_until(lambda: any("shutting down" in line for line in server.lines))
    begin = time.monotonic()
    server.signal(signal.SIGINT)
    assert server.process.wait(10) == 130
    assert time.monotonic() - begin < 3


def test_template_exception(start, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('only cats may talk') }}")
    server = start("--chat-template", template).ready()
    response = server.chat()
    assert response.status_code == 400
    assert "only cats may talk" in response.json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1}).status_code == 200


def test_request_timeout(start):
    server = start("--request-timeout", 1).ready()
    response = server.post(CHAT, {**LONG, "stream": False})
    assert response.status_code == 408 and response.json()["error"]["code"] == "request_timeout"


def test_config_file(start, tmp_path):
    config = tmp_path / "oscar.toml"
    config.write_text('[serve]\nmodel-name = ["pet", "dog"]\nmax-model-len = 512\n')
    command = [BINARY, "--config", str(config), "serve", "--model", str(DEMO), "--dry-run", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["max_context"] == 512


def test_prefixes_survive_a_restart(start, tmp_path):
    options = ("--prefix-dir", tmp_path / "prefixes", "--prefill-cell", 256, "--max-model-len", 4096)
    prompt = "The old lighthouse stood above the harbour and counted the ships. " * 120
    first = start(*options).ready()
    usage = first.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0}).json()["usage"]
    assert usage["prompt_tokens"] > 1000 and usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert first.stop() == 0
    second = start(*options).ready()
    follow_up = {"prompt": prompt + "What did it count?", "max_tokens": 4, "temperature": 0}
    usage = second.post("/v1/completions", follow_up).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 500
    assert second.metrics()["oscar_cached_prompt_tokens_total"] > 500


@pytest.mark.parametrize("end", ["drain", "kill"])
def test_a_12k_follow_up_after_a_restart(start, tmp_path, end):
    """The conversation of the first process is continued by the second without reading it again."""
    options = ("--prefix-dir", tmp_path / "prefixes")
    messages = json.loads((ROOT / "examples/needle.json").read_text())
    first = start(*options).ready()
    body = {"messages": messages, "max_tokens": 16, "temperature": 0}
    answer = first.post(CHAT, body, timeout=900).json()
    size = answer["usage"]["prompt_tokens"]
    assert 12000 < size < 12600
    if end == "drain":
        assert first.stop() == 0
    else:
        # Pages are written behind the answer's back; all of them are there soon after it.
        files = lambda: sum(1 for _ in (tmp_path / "prefixes").rglob("*.page"))  # noqa: E731
        assert wait_until(lambda: files() >= (size - 256) // 64, 60), files()
        first.signal(signal.SIGKILL)
        first.process.wait(10)
    second = start(*options).ready()
    follow_up = messages + [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                            {"role": "user", "content": "Say that again."}]
    begin = time.monotonic()
    usage = second.post(CHAT, {**body, "messages": follow_up}, timeout=900).json()["usage"]
    print(f"{usage['prompt_tokens']} tokens, {usage['prompt_tokens_details']['cached_tokens']} found, "
          f"{time.monotonic() - begin:.1f} s")
    # All but the recent window, which was still in BF16, what is new, and the page being written when it was killed.
    lost = 0 if end == "drain" else 64
    assert usage["prompt_tokens_details"]["cached_tokens"] >= size - 256 - 64 - lost
    assert second.metrics()["oscar_cached_prompt_tokens_total"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_echo_equals_the_evaluators_perplexity(start, tmp_path):
    """Scores of a prompt over the API are those that `oscar eval` computes itself."""
    prose = json.loads((DEMO / "eval/heldout_prose.json").read_text())
    text = max(prose, key=len)
    server = start("--prefill-cell", 64).ready()
    ids = server.post("/tokenize", {"prompt": "\n\n".join([text] * 3)}).json()["tokens"][:4096]
    assert len(ids) == 4096
    document = server.post("/detokenize", {"tokens": ids + ids[:200]}).json()["prompt"]
    (tmp_path / "text.json").write_text(json.dumps([document]))
    again = server.post("/tokenize", {"prompt": document}).json()["tokens"][:4096]
    scored = server.post("/v1/completions", {"prompt": again, "max_tokens": 0, "echo": True, "logprobs": 0},
                         timeout=900)
    assert scored.status_code == 200, scored.text[:500]
    logprobs = scored.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs[0] is None and len(logprobs) == 4096
    nll = -sum(logprobs[1:]) / 4095
    out = tmp_path / "out"
    run = subprocess.run([BINARY, "eval", "--model", str(DEMO), "--kv", "oscar+", "--suite", str(DEMO / "eval"), "--tasks",
                          "recall_4k", "--limit", "1", "--text", str(tmp_path / "text.json"), "--text-windows", "1",
                          "--out", str(out)], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    (method,) = json.loads((out / "results.json").read_text())["methods"]
    assert method["text"]["nll"] == pytest.approx(nll, abs=1e-4)
