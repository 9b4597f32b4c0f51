"""Traffic that means harm, or was never tested: every answer is an error object, nothing leaks and nobody else waits."""
import json
import pathlib
import re
import socket
import time

import pytest

from conftest import ROOT, http_request, wait_until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]

# Every field of both endpoints, and values of which none is right.
WRONG = {
    "model": [5, [], {}, True],
    "max_tokens": ["4", -1, 1.5, [], {}, True, 1e300, 2**63],
    "temperature": ["hot", -0.1, 2.1, [], {}, True, 1e300],
    "top_p": ["x", 0, 1.01, -1, []],
    "top_k": ["x", -2, 1.5, 2**40],
    "min_p": ["x", -0.1, 1.1],
    "n": ["2", 0, -1, 129, 10**9, 1.5, []],
    "stop": [5, [5], ["a", "b", "c", "d", "e"], [""], "", ["x" * 257], {}, ["a"] * 100000],
    "seed": ["x", 1.5, 2**63, [], {}],
    "stream": ["yes", 1, []],
    "stream_options": [5, [], {"include_usage": "x"}],
    "frequency_penalty": ["x", 2.1, -2.1],
    "presence_penalty": ["x", 2.1, -2.1],
    "repetition_penalty": ["x", 0, -1, 11],
    "logit_bias": [5, [], {"x": 1}, {"-1": 1}, {"99999999": 1}, {"5": 101}, {"5": "x"}, {"5": None}, {" 5": 1},
                   {"5.0": 1}, {str(i): 0 for i in range(1025)}],
    "min_tokens": ["x", -1, 2**40],
    "stop_token_ids": [5, ["x"], [-1], [10**9], [1.5], [0] * 65],
    "ignore_eos": ["x", 1],
    "include_stop_str_in_output": ["x", 1],
    "skip_special_tokens": ["x", 1],
    "return_token_ids": ["x", 1],
    "prompt_logprobs": ["x", -1, 21, True],
    "truncate_prompt_tokens": ["x", 0, -1],
    "request_id": [5, "x" * 200, "a b", "é"],
    "cache_salt": [5, "x" * 300],
    "response_format": [5, "text", {}, {"type": 5}, {"type": "xml"}],
    "bad_words": [5, [5], [""], {}, ["x" * 257], ["x"] * 257, [["x"]]],
    "allowed_token_ids": [5, [], [-1], [10**9], [1.5], ["x"], {}, [0] * 100000],
    "priority": ["x", 1.5, 2**31, -2**40, [], True],
    "best_of": ["2", 0, -1, 129, 1.5, []],
    "guided_json": [5, [], "x", {"not": {}}],
    "guided_regex": [5, "", "("],
    "guided_choice": [5, [], [5]],
    "grammar": [5, "x"],
    "structured_outputs": [5, {"x": 1}],
    "suffix": ["x"],
}
WRONG_CHAT = {
    "messages": [5, "x", {}, [], [5], [{}], [{"role": 5, "content": "x"}], [{"role": "wizard", "content": "x"}],
                 [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
                 [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": [{"type": "text"}]}],
                 [{"role": "assistant", "content": "x", "tool_calls": 5}],
                 [{"role": "assistant", "content": "x", "tool_calls": [5]}],
                 [{"role": "assistant", "content": "x", "tool_calls": [{"function": 5}]}],
                 [{"role": "user", "content": "x"}] * 4097],
    "logprobs": [5, "x", []],
    "top_logprobs": ["x", -1, 21, 5],
    "tools": [5, {}, [5], [{}] * 513, [{}], [{"type": "function", "function": {"name": "a b"}}],
              [{"type": "function", "function": {"name": "f"}}] * 2, [{"type": "web_search"}],
              [{"type": "function", "function": {"name": "f", "parameters": []}}],
              [{"type": "function", "function": {"name": "f", "description": "x" * (1 << 20)}}]],
    "tool_choice": ["required", {"type": "function"}, 5, "sometimes", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": ["x", 5],
    "chat_template_kwargs": [5, [], {"messages": []}],
    "add_generation_prompt": ["x", 5],
    "continue_final_message": ["x", 5],
    "chat_template": ["{{ x }}"],
    "functions": [[{}]],
    "echo": [True],
}
WRONG_TEXT = {
    "prompt": [5, {}, [], [[]], [5, "x"], ["x", 5], [[5], ["x"]], [-1], [10**9], [1.5], [True], ["x"] * 65, "", [""]],
    "logprobs": ["x", -1, 21, True, 1.5],
    "echo": ["x", 5],
}


def check(response, name=None):
    assert 400 <= response.status_code < 500, (name, response.status_code, response.text[:200])
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["type"] == "invalid_request_error" and error["message"], error
    return error


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_wrong_types_and_ranges(server, path):
    good = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    wrong = {**WRONG, **(WRONG_CHAT if path == CHAT else WRONG_TEXT)}
    before = server.metrics()
    with server.client() as client:
        for name, values in wrong.items():
            for value in values:
                error = check(client.post(path, json={"max_tokens": 1, **good, name: value}), (name, str(value)[:60]))
                assert error["param"] is None or error["param"].startswith(name), (name, value, error)
                assert len(error["message"]) < 2000
    after = server.metrics()
    assert after["oscar_generation_tokens_total"] == before["oscar_generation_tokens_total"]


def test_numbers_that_json_cannot_say(server):
    headers = {"content-type": "application/json"}
    for body in (b'{"messages": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e99999}', b'{"n": 0x1}',
                 b'{"a": "\\ud800"}', b'{"a": "\\udc00\\ud800"}', b'{"a": "\x00"}', b'{"a" 5}', b"", b"null", b"[]", b'"x"',
                 b'{"a": 1}{"b": 2}', b"\xef\xbb\xbf" * 3 + b"{}", b"{" + b'"k":0,' * 200000 + b'"k":0}',
                 b"{" + b",".join(b'"%d":0' % i for i in range(200000)) + b"}"):
        begin = time.monotonic()
        check(server.post(CHAT, content=body, headers=headers), body[:30])
        assert time.monotonic() - begin < 10


def test_surrogate_pairs_and_every_plane(server):
    text = "".join(chr(c) for c in (0x41, 0xE9, 0x4E16, 0x1F642, 0x10FFFF, 0xFFFD, 0x200D)) + "\u0000\u001f"
    raw = json.dumps({"prompt": text, "max_tokens": 1, "temperature": 0}).encode()  # escapes, pairs included
    assert b"\\ud83d\\ude42" in raw
    answer = server.post(TEXT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    counted = server.post("/tokenize", {"prompt": text}).json()
    assert answer.json()["usage"]["prompt_tokens"] == counted["count"]
    assert server.post("/detokenize", {"tokens": counted["tokens"]}).json()["prompt"] == text


def test_huge_max_tokens(server):
    error = check(server.post(TEXT, json := {"prompt": "Hi", "max_tokens": 2**31}))
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"], json


def test_request_ids(server):
    with server.client() as client:
        given = client.get("/health", headers={"X-Request-Id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        drawn = {client.get("/health").headers["x-request-id"] for _ in range(3)}
        assert len(drawn) == 3
        assert client.get("/nothing").headers["x-request-id"]  # errors are findable in the log, too
        bad = client.get("/health", headers={"X-Request-Id": "x" * 500})
        assert len(bad.headers["x-request-id"]) < 130
        answer = client.post(TEXT, json={"prompt": "Hi", "max_tokens": 1, "request_id": "from-body"})
        assert answer.json()["id"] == "cmpl-from-body" and answer.headers["x-request-id"] == "from-body"


def read_responses(sock, count, seconds=60):
    """Bodies of `count` responses with a Content-Length, in order."""
    sock.settimeout(seconds)
    data, out = b"", []
    while len(out) < count:
        while b"\r\n\r\n" not in data:
            piece = sock.recv(65536)
            assert piece, (out, data)
            data += piece
        head, _, data = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head).group(1))
        while len(data) < length:
            data += sock.recv(65536)
        out.append((int(head.split()[1]), data[:length]))
        data = data[length:]
    return out


def test_pipelined_requests_and_keep_alive(server):
    sock = server.connect()
    one = http_request(TEXT, {"prompt": "Hi", "max_tokens": 1, "temperature": 0})
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    sock.sendall(get + one + get + http_request(TEXT, {"prompt": 5}) + get)
    assert [status for status, _ in read_responses(sock, 5)] == [200, 200, 200, 400, 200]
    sock.sendall(get)  # the connection is still good
    assert read_responses(sock, 1)[0][0] == 200
    sock.close()


def test_chunked_request_body(server):
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    sock = server.connect()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                 b"Transfer-Encoding: chunked\r\n\r\n")
    for at in range(0, len(body), 7):
        piece = body[at:at + 7]
        sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
    sock.sendall(b"0\r\n\r\n")
    status, answer = read_responses(sock, 1)[0]
    assert status == 200 and json.loads(answer)["object"] == "text_completion"
    sock.close()


def test_methods(server):
    with server.client() as client:
        head = client.head("/health")
        assert head.status_code == 200 and head.content == b""
        for method, path in (("PUT", "/health"), ("DELETE", CHAT), ("PATCH", "/v1/models"), ("GET", TEXT), ("POST", "/metrics")):
            response = client.request(method, path)
            assert response.status_code == 405, (method, path)
            assert response.json()["error"]["code"] == "method_not_allowed" and "allow" in response.headers
        for path in ("/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/../etc/passwd", "/%00", "/v1/chat/completions/"):
            response = client.request("POST", path, json={})
            assert response.status_code in (400, 404), path
            assert response.json()["error"]["type"] in ("not_found_error", "invalid_request_error")
        assert client.options("/anything").status_code == 204


def test_cors(start):
    server = start("--cors-origin", "https://a.example", "--api-key", "k").ready()
    with server.client() as client:
        yes = client.options(CHAT, headers={"Origin": "https://a.example", "Access-Control-Request-Method": "POST"})
        assert yes.status_code == 204 and yes.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in yes.headers["access-control-allow-methods"]
        no = client.options(CHAT, headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in no.headers
        refused = client.post(CHAT, json={}, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"


def test_slow_and_half_open_clients_delay_nobody(server):
    held = []
    for i in range(40):
        sock = server.connect()
        if i % 3 == 0:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")  # never ends its head
        elif i % 3 == 1:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: 1000\r\n\r\n{\"prompt\"")  # never ends its body
        held.append(sock)  # the rest say nothing
    begin = time.monotonic()
    assert server.get("/health").status_code == 200
    assert server.post(TEXT, {"prompt": "Hi", "max_tokens": 2}).status_code == 200
    assert time.monotonic() - begin < 20
    # A head that has not ended after ten seconds is answered with 408, or just cut off.
    held[0].settimeout(30)
    answer = held[0].recv(4096)
    assert answer == b"" or b" 408 " in answer.split(b"\r\n")[0]
    for sock in held:
        sock.close()


def test_garbage_on_the_wire(server):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"GET\r\n\r\n", b"\r\n" * 50, b"A" * 100000,
                 b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
                 b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"):
        sock = server.connect()
        sock.settimeout(30)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
        except (ConnectionError, TimeoutError):
            continue  # cut off: fine
        finally:
            sock.close()
        if answer:
            assert answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.1 5"), (data[:40], answer[:100])
            assert b'"error"' in answer, (data[:40], answer[:300])
    assert server.get("/health").status_code == 200


def test_nothing_is_left(server):
    """After all of the above: no request, no stream, no sequence."""
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 0)
    values = server.metrics()
    assert values["oscar_requests_waiting"] == 0 and values["oscar_streams"] == 0
    assert not any(sequence["running"] for sequence in server.get("/v1/oscar/cache").json()["sequences"])


def test_metric_names_of_the_contract(server):
    text = server.get("/metrics").text
    names = set(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    expected = {
        "counter": ["requests_total", "http_responses_total", "prompt_tokens_total", "cached_prompt_tokens_total",
                    "generation_tokens_total", "preemptions_total", "cancelled_total", "prefix_cache_queries_total",
                    "prefix_cache_hits_total", "evictions_total"],
        "gauge": ["requests_running", "requests_waiting", "kv_blocks_used", "kv_blocks_total", "kv_bytes",
                  "kv_effective_bits", "model_loaded", "build_info"],
        "histogram": ["time_to_first_token_seconds", "time_per_output_token_seconds", "request_duration_seconds",
                      "queue_seconds", "prefill_seconds", "batch_tokens", "inter_token_seconds"],
    }
    for kind, members in expected.items():
        for name in members:
            assert (f"oscar_{name}", kind) in names, name
    values = server.metrics()
    for kind in ("open", "sealed"):
        used, free, total = (values[f'oscar_kv_blocks_{w}{{kind="{kind}"}}'] for w in ("used", "free", "total"))
        assert used + free == total
    assert sum(values[f'oscar_kv_bytes{{region="{r}"}}'] for r in ("sink", "bulk", "recent")) == values["oscar_kv_used_bytes"]
    assert values["oscar_batch_tokens_count"] == values["oscar_engine_steps_total"]


def test_dashboard_speaks_of_metrics_that_exist(server):
    text = server.get("/metrics").text
    names = set(re.findall(r"^(oscar_\w+)", text, re.M))
    dashboard = json.loads((pathlib.Path(ROOT) / "docs/grafana/oscar.json").read_text())
    used = set(re.findall(r"oscar_\w+", json.dumps([p["targets"] for p in dashboard["panels"]])))
    assert len(used) > 15
    assert used <= names, used - names


def test_limits_are_told_and_held(start):
    server = start("--max-n", 2, "--max-stops", 1, "--max-logprobs", 3, "--max-messages", 2, "--max-body", "64KiB").ready()
    limits = server.get("/props").json()["limits"]
    assert (limits["n"], limits["stops"], limits["top_logprobs"], limits["messages"]) == (2, 1, 3, 2)
    assert limits["body_bytes"] == 65536 and limits["headers"] > 0 and limits["running"] > 0 and limits["waiting"] > 0
    for fields in ({"n": 3}, {"stop": ["a", "b"]}, {"logprobs": True, "top_logprobs": 4}, {"messages": MESSAGES * 3}):
        check(server.post(CHAT, {"messages": MESSAGES, **fields}), fields)
    assert server.post(CHAT, {"messages": [{"role": "user", "content": "x" * 70000}]}).status_code == 413
