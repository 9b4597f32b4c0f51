"""/v1/responses and /v1/messages on the demo model: what coding agents rely on, and what hostile clients send."""
import json

import httpx
import pytest

from conftest import http_request, wait_until

QUESTION = "What is the capital of France?"
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def events_of(server, path, **fields):
    """Named events of a stream, after checking the framing; pings that are comments are dropped."""
    with server.client() as client:
        with client.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            raw = b"".join(response.iter_raw())
    frames = raw.split(b"\n\n")
    assert frames[-1] == b"", "the last frame is not ended"
    events = []
    for frame in frames[:-1]:
        if frame == b": ping":
            continue
        name, data = frame.split(b"\n")
        assert name.startswith(b"event: ") and data.startswith(b"data: "), frame
        events.append(json.loads(data[6:]))
        assert events[-1]["type"] == name[7:].decode()
    return events


def respond(server, **fields):
    response = server.post("/v1/responses", {"temperature": 0, "max_output_tokens": 16, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def texts_of(response):
    return [item["content"][0]["text"] for item in response["output"] if item.get("content")]


def message(server, **fields):
    body = {"model": "demo", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}], **fields}
    response = server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_all_apis_say_the_same(server):
    """One prompt, one answer, whichever API asks and however it is sent."""
    chat = server.chat(QUESTION, max_tokens=16).json()
    said = chat["choices"][0]["message"]
    expected = [text for text in (said.get("reasoning_content"), said["content"]) if text]
    response = respond(server, input=QUESTION)
    assert texts_of(response) == expected
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    streamed = events_of(server, "/v1/responses", input=QUESTION, temperature=0, max_output_tokens=16)
    assert texts_of(streamed[-1]["response"]) == expected
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    told = message(server)
    assert [block.get("text") or block.get("thinking") for block in told["content"]] == expected
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    events = events_of(server, "/v1/messages", max_tokens=16, temperature=0, messages=[{"role": "user", "content": QUESTION}])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") or delta.get("thinking", "") for delta in deltas) == "".join(expected)
    assert events[-2]["delta"]["stop_reason"] == told["stop_reason"]


def test_conversations(server):
    first = respond(server, input=QUESTION)
    second = respond(server, input="And of Italy?", previous_response_id=first["id"])
    by_hand = respond(server, input=[{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "And of Italy?"}])
    assert texts_of(second) == texts_of(by_hand)
    assert second["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    assert by_hand["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert server.get(f"/v1/responses/{second['id']}").json() == second
    counted = server.post("/v1/responses/input_tokens", {"input": "And of Italy?", "previous_response_id": first["id"]})
    assert counted.json()["input_tokens"] == second["usage"]["input_tokens"]
    with server.client() as client:
        assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert server.get(f"/v1/responses/{first['id']}").status_code == 404
    missing = server.post("/v1/responses", {"input": "x", "previous_response_id": first["id"]})
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "previous_response_id"
    # What it was the beginning of can still be continued.
    respond(server, input="And?", previous_response_id=second["id"])


def test_options_of_the_store(start):
    none = start("--response-store", 0).ready()
    made = respond(none, input="x")
    assert none.get(f"/v1/responses/{made['id']}").status_code == 404
    few = start("--response-store-count", 2, "--response-store", "1MiB").ready()
    ids = [respond(few, input=f"{i}", max_output_tokens=1)["id"] for i in range(3)]
    assert [few.get(f"/v1/responses/{i}").status_code for i in ids] == [404, 200, 200]
    limits = few.get("/props").json()["limits"]
    assert (limits["response_store_count"], limits["response_store_bytes"]) == (2, 1 << 20)
    assert few.metrics()["oscar_responses_stored"] == 2


def test_keys_of_both_kinds(start):
    server = start("--api-key", "alice", "--api-key", "bob").ready()
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for headers in ({"x-api-key": "alice", "anthropic-version": "2023-06-01"}, {"Authorization": "Bearer alice"}):
        assert server.post("/v1/messages", body, headers=headers).status_code == 200
    refused = server.post("/v1/messages", body, headers={"x-api-key": "carol"})
    assert refused.status_code == 401
    assert refused.json()["type"] == "error" and refused.json()["error"]["type"] == "authentication_error"
    assert refused.headers["request-id"] == refused.json()["request_id"]
    made = server.post("/v1/responses", {"input": "x", "max_output_tokens": 1}, headers={"x-api-key": "alice"}).json()
    for key, status in (("alice", 200), ("bob", 404), ("carol", 401)):
        assert server.get(f"/v1/responses/{made['id']}", headers={"x-api-key": key}).status_code == status
    metrics = server.get("/metrics", headers={"x-api-key": "bob"}).text
    assert 'oscar_requests_total{endpoint="responses"' in metrics and 'oscar_requests_total{endpoint="messages"' in metrics
    assert wait_until(lambda: any(" messages status=200" in line for line in server.lines)), server.lines


def test_count_tokens(server):
    body = {"model": "demo", "system": "Be brief.", "tools": [TOOL], "messages": [{"role": "user", "content": QUESTION}]}
    counted = server.post("/v1/messages/count_tokens", body).json()
    usage = message(server, **body)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_disconnects_cancel(server):
    before = server.metrics()["oscar_cancelled_total"]
    for path, body in (("/v1/responses", {"input": QUESTION}),
                       ("/v1/messages", {"max_tokens": 2000, "messages": [{"role": "user", "content": QUESTION}]})):
        with server.connect() as connection:
            connection.sendall(http_request(path, {**body, "stream": True, "ignore_eos": True}))
            assert connection.recv(1)
    assert wait_until(lambda: server.metrics()["oscar_cancelled_total"] == before + 2)
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 0)


def test_answers_end_at_the_context(server):
    """max_tokens is an upper bound here: agents ask for more than a context holds."""
    whole = message(server, max_tokens=1_000_000, ignore_eos=True, messages=[{"role": "user", "content": "word " * 4000}])
    assert whole["stop_reason"] == "model_context_window_exceeded"
    long = server.post("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "word " * 9000}]})
    assert long.status_code == 400 and "prompt is too long: " in long.json()["error"]["message"]
    long = server.post("/v1/responses", {"input": "word " * 9000})
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"


HOSTILE = [
    b"", b"[]", b"null", b"{", b"{\"input\": \"\xff\xfe\"", b"[" * 100_000, b"{\"input\":" + b"[" * 70 + b"]" * 70 + b"}",
    b'{"input": 1e999}', b'{"input": "x", "max_output_tokens": 99999999999999999999}',
    b'{"max_tokens": 5, "messages": [' + b",".join([b'{"role":"user","content":"x"}'] * 5000) + b"]}",
    b'{"input": [' + b",".join([b'{"role":"user","content":"x"}'] * 5000) + b"]}",
    b'{"input": [' + b",".join([b'{"type":"item_reference","id":"msg_a_0"}'] * 4000) + b"]}",
    b'{"input": "x", "tools": [' + b",".join([b'{"type":"function","name":"f"}'] * 600) + b"]}",
    b'{"input": "x", "metadata": {"' + b"k" * 70 + b'": "v"}}',
    b'{"input": "x", "previous_response_id": "' + b"a" * 100_000 + b'"}',
    b'{"input": "x", "previous_response_id": "resp_\\u0000\\n../../etc/passwd"}',
    b'{"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "' + b"t" * 100_000 + b'"}]}]}',
    b'{"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": {"a": 1}}]}]}',
    b'{"max_tokens": -1, "messages": []}',
]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"])
def test_hostile_bodies(server, path):
    for body in HOSTILE:
        answer = server.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 404, 411, 413), (body[:80], answer.text)
        error = answer.json()["error"]
        assert error["message"] and len(answer.content) < 5000
        assert ("type" in answer.json()) == path.startswith("/v1/messages")
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses/", "/v1/responses/%00", "/v1/responses/..%2f..", "/v1/responses/" + "a" * 5000,
                                  "/v1/responses/%ff%fe/input_items", "/v1/responses//input_items"])
def test_hostile_paths(server, path):
    for method in ("GET", "DELETE"):
        with server.client() as client:
            answer = client.request(method, path)
        assert answer.status_code in (400, 404, 405, 414), answer.text
        assert answer.json()["error"]["message"]


def test_wrong_methods(server):
    with server.client() as client:
        answer = client.put("/v1/responses/x", content=b"{}")
        assert answer.status_code == 405 and answer.headers["allow"] == "GET, DELETE, OPTIONS"
        assert client.get("/v1/messages").status_code == 405
        assert client.head("/v1/responses/x").status_code == 404
        assert isinstance(client.get("/v1/responses").json()["error"]["message"], str)
    assert httpx.post(server.url + "/v1/responses/x/cancel", json={}).status_code == 405
