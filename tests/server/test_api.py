"""The acceptance list of the API, item by item, on the demo model."""
import json
import math
import re
import threading

import pytest

from conftest import ROOT, Server

CHAT = "/v1/chat/completions"


def error_of(response, status, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert error["message"]
    return error


def text_of(events):
    return "".join(e["choices"][0].get("delta", {}).get("content", "") for e in events if e["choices"])


def test_models(server):
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == "demo" and card["object"] == "model" and card["max_model_len"] == 4096
    assert server.get("/v1/models/demo").json() == card
    error_of(server.get("/v1/models/other"), 404, "model_not_found")


def test_golden_chats(server):
    """Answers equal those of the reference implementation."""
    golden = json.loads((ROOT / "tests/data/golden/golden.json").read_text())
    for chat in golden["chats"]:
        body = {"messages": [{"role": "user", "content": chat["user"]}], "temperature": 0, "return_token_ids": True}
        answer = server.post(CHAT, body).json()
        choice = answer["choices"][0]
        assert choice["prompt_token_ids"] == chat["prompt_ids"]
        assert choice["token_ids"] == chat["greedy_ids"]
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == len(chat["prompt_ids"])
        assert answer["usage"]["completion_tokens"] == len(chat["greedy_ids"])


def test_stream_equals_whole(server):
    whole = server.chat().json()
    events = server.stream(
        messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=24,
        stream_options={"include_usage": True},
    )
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(e["object"] == "chat.completion.chunk" for e in events)
    assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1
    assert all(e["usage"] is None for e in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    finish = [e["choices"][0]["finish_reason"] for e in events[:-1]]
    assert finish[-1] == whole["choices"][0]["finish_reason"] and not any(finish[:-1])
    assert events[-2]["choices"][0]["delta"] == {}


def test_stream_headers(server):
    with server.client() as client:
        with client.stream("POST", CHAT, json={"messages": [{"role": "user", "content": "Hi"}], "stream": True,
                                               "max_tokens": 2}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            response.read()


def test_usage_equals_tokenizer(server):
    prompt = "The quick brown fox — naïve 世界 🙂"
    tokens = server.post("/tokenize", {"prompt": prompt}).json()
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 7, "ignore_eos": True,
                                             "temperature": 0}).json()
    assert answer["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "length"
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == prompt


def test_stops(server):
    full = server.chat(max_tokens=40).json()["choices"][0]["message"]["content"]
    assert len(full) > 8, full
    middle = full[3:8]  # across tokens, as likely as not
    expected = full[: full.index(middle)]
    for stop in (middle, [middle, "\u0000never"]):
        choice = server.chat(max_tokens=40, stop=stop).json()["choices"][0]
        assert choice["message"]["content"] == expected
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == middle
    kept = server.chat(max_tokens=40, stop=middle, include_stop_str_in_output=True).json()
    assert kept["choices"][0]["message"]["content"] == expected + middle
    zero = server.chat(max_tokens=40, stop=full[:2]).json()["choices"][0]
    assert zero["message"]["content"] == "" and zero["finish_reason"] == "stop"
    events = server.stream(messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0,
                           max_tokens=40, stop=middle)
    assert text_of(events) == expected


def test_seeds_alone_and_in_a_batch(server):
    fields = {"n": 3, "seed": 42, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}

    def texts():
        return [c["message"]["content"] for c in server.chat("Tell me a story.", **fields).json()["choices"]]

    alone = texts()
    assert len(alone) == 3 and len(set(alone)) > 1
    assert texts() == alone
    results, threads = [], []
    for i in range(6):
        threads.append(threading.Thread(target=lambda: results.append(texts())))
        threads.append(threading.Thread(target=lambda i=i: server.chat(f"Noise {i}", temperature=1, max_tokens=30)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * 6
    other = server.chat("Tell me a story.", **{**fields, "seed": 43}).json()
    assert [c["message"]["content"] for c in other["choices"]] != alone


@pytest.mark.parametrize("stop", [None, ["e"], ["\u00e9", "the "]])
def test_streamed_choices_equal_whole_ones(server, stop):
    """Several choices at once, with seeds, stops, logprobs and running usage: the stream adds up to the answer."""
    fields = {"messages": [{"role": "user", "content": "Tell me a story."}], "n": 3, "seed": 5, "temperature": 1.0,
              "max_tokens": 20, "stop": stop, "logprobs": True, "top_logprobs": 2}
    whole = server.post(CHAT, fields).json()
    events = server.stream(**fields, stream_options={"include_usage": True, "continuous_usage_stats": True})
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["finish_reason"] and own[-1]["stop_reason"] == choice["stop_reason"]
        logprobs = [entry for c in own for entry in (c.get("logprobs") or {}).get("content", [])]
        assert logprobs == choice["logprobs"]["content"]
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[-1] == whole["usage"]["completion_tokens"]


def test_tools_and_tool_calls_reach_the_template(server):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    for choice in (None, "auto", "none"):
        answer = server.post(CHAT, {"messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": 2})
        assert answer.status_code == 200, answer.text


def test_chat_logprobs(server):
    choice = server.chat(logprobs=True, top_logprobs=3, max_tokens=5).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 5
    assert b"".join(bytes(e["bytes"]) for e in content).decode() == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])  # greedy
        assert entry["logprob"] <= 0
        assert sum(math.exp(t["logprob"]) for t in entry["top_logprobs"]) <= 1.0 + 1e-5
    events = server.stream(messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0,
                           max_tokens=5, logprobs=True, top_logprobs=3)
    streamed = [entry for e in events for entry in (e["choices"][0].get("logprobs") or {}).get("content", [])]
    assert [e["token"] for e in streamed] == [e["token"] for e in content]


def test_echo_scores_the_prompt(server):
    prompt = "The capital of France is Paris. The capital of Italy is Rome."
    scored = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}).json()
    choice = scored["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt and scored["usage"]["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == prompt
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    # Each score again, as the score of a generated token: the same model, one token at a time.
    ids = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    for at in (1, len(ids) // 2, len(ids) - 1):
        one = server.post("/v1/completions", {"prompt": ids[:at], "max_tokens": 1, "logprobs": 20, "temperature": 0,
                                              "ignore_eos": True}).json()["choices"][0]["logprobs"]
        candidates = one["top_logprobs"][0]
        if logprobs["tokens"][at] in candidates:
            assert candidates[logprobs["tokens"][at]] == pytest.approx(logprobs["token_logprobs"][at], abs=0.05)


def test_prompt_logprobs(server):
    prompt = "The capital of France is Paris."
    fields = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 1, "echo": True}
    choice = server.post("/v1/completions", {**fields, "prompt_logprobs": 3}).json()["choices"][0]
    ids = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    scores = choice["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(ids)
    for at in range(1, len(ids)):
        own = scores[at][str(ids[at])]
        assert own["logprob"] == pytest.approx(choice["logprobs"]["token_logprobs"][at])
        assert own["decoded_token"] == choice["logprobs"]["tokens"][at]
        ranks = sorted(entry["rank"] for entry in scores[at].values())
        assert ranks[:3] == [1, 2, 3] and len(scores[at]) == (3 if own["rank"] <= 3 else 4)
        # Asking for three beside the prompt's tokens changes nothing elsewhere: the likeliest, and the token itself.
        top = choice["logprobs"]["top_logprobs"][at]
        assert len(top) == (1 if own["rank"] == 1 else 2)
        assert top[choice["logprobs"]["tokens"][at]] == choice["logprobs"]["token_logprobs"][at]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][len(ids):])
    plain = server.post("/v1/completions", {**fields, "echo": False, "prompt_logprobs": 0}).json()["choices"][0]
    assert [list(e) for e in plain["prompt_logprobs"][1:]] == [[str(i)] for i in ids[1:]]
    assert plain["text"] == choice["text"][len(prompt):]
    chat = server.chat(prompt_logprobs=1, max_tokens=1).json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert error_of(server.chat(prompt_logprobs=1, stream=True), 400, "invalid_value")["param"] == "prompt_logprobs"


def test_prompt_shapes(server):
    ids = server.post("/tokenize", {"prompt": "Hello there"}).json()["tokens"]
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    by_text = server.post("/v1/completions", {"prompt": "Hello there", **fields}).json()["choices"][0]["text"]
    many = server.post("/v1/completions", {"prompt": ["Hello there", "Good"], "n": 2, **fields}).json()["choices"]
    assert [c["index"] for c in many] == [0, 1, 2, 3]
    assert many[0]["text"] == many[1]["text"] == by_text
    for prompt in (ids, [ids]):
        got = server.post("/v1/completions", {"prompt": prompt, **fields}).json()["choices"][0]["text"]
        assert got == by_text


def test_context_overflow(server):
    error = error_of(server.post("/v1/completions", {"prompt": [5] * 4000, "max_tokens": 97}), 400,
                     "context_length_exceeded")
    for number in ("4000", "97", "4096"):
        assert number in error["message"]
    error_of(server.post("/v1/completions", {"prompt": [5] * 5000}), 400, "context_length_exceeded")


def test_null_unknown_and_unsupported(server):
    assert server.chat(stop=None, seed=None, logit_bias=None, tools=None, shiny_new_field={"x": 1}).status_code == 200
    assert error_of(server.chat(response_format={"type": "xml"}), 400, "unsupported_parameter")["param"]
    assert error_of(server.chat(temperature="hot"), 400, "invalid_value")["param"] == "temperature"


def test_error_table(server):
    error_of(server.post(CHAT, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_json")
    error_of(server.post(CHAT, {}), 400, "missing_required_parameter")
    error_of(server.chat(model="gpt-4"), 404, "model_not_found")
    error_of(server.get("/v1/embeddings"), 404, "not_found")
    error_of(server.get(CHAT), 405, "method_not_allowed")
    error_of(server.post(CHAT, content=b"x", headers={"content-type": "text/plain"}), 415, "unsupported_media_type")


def test_body_of_17_mib(server):
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (17 << 20)}]}).encode()
    error_of(server.post(CHAT, content=body, headers={"content-type": "application/json"}), 413, "payload_too_large")


def test_bad_utf8_and_deep_json(server):
    headers = {"content-type": "application/json"}
    bad = b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'
    error_of(server.post(CHAT, content=bad, headers=headers), 400, "invalid_json")
    deep = b'{"messages": ' + b"[" * 100000 + b"]" * 100000 + b"}"
    error_of(server.post(CHAT, content=deep, headers=headers), 400, "invalid_json")


def test_special_tokens_in_messages_are_text(server):
    rendered = server.post("/apply-template", {"messages": [{"role": "user", "content": "<|im_end|>"}]}).json()
    end = server.post("/tokenize", {"prompt": "<|im_end|>"}).json()["tokens"]
    assert len(end) == 1
    assert rendered["tokens"].count(end[0]) == 1


def means(choices):
    """The mean logprob of each choice's tokens."""
    out = []
    for choice in choices:
        logprobs = [t["logprob"] for t in choice["logprobs"]["content"]]
        out.append(sum(logprobs) / len(logprobs))
    return out


def test_best_of(server):
    fields = {"messages": [{"role": "user", "content": "Tell me a story."}], "seed": 11, "temperature": 1.0,
              "max_tokens": 10, "ignore_eos": True}
    every = server.post(CHAT, {**fields, "n": 6, "logprobs": True}).json()
    scores = means(every["choices"])
    order = sorted(range(6), key=lambda i: -scores[i])
    best = server.post(CHAT, {**fields, "n": 2, "best_of": 6}).json()
    assert [c["message"]["content"] for c in best["choices"]] == [
        every["choices"][i]["message"]["content"] for i in order[:2]]
    assert [c["index"] for c in best["choices"]] == [0, 1] and best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 60, "all that were generated count"
    # Several prompts: the best of each, in the order of prompts.
    text = {"prompt": ["Once", "The sea"], "seed": 3, "temperature": 1.0, "max_tokens": 6}
    both = server.post("/v1/completions", {**text, "best_of": 4, "n": 1, "echo": True}).json()["choices"]
    assert [c["index"] for c in both] == [0, 1]
    assert both[0]["text"].startswith("Once") and both[1]["text"].startswith("The sea")
    error_of(server.post(CHAT, {**fields, "best_of": 2, "stream": True}), 400, "invalid_value")


def test_many_choices(server):
    answer = server.chat(n=40, max_tokens=2, temperature=1, seed=1).json()
    assert [c["index"] for c in answer["choices"]] == list(range(40))


def test_bad_words(server):
    fields = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
    prompt = {"prompt": "Once upon a time"}
    free = server.post("/v1/completions", {**prompt, **fields}).json()["choices"][0]
    word = next(w for w in free["text"].split()[1:] if w.isalpha())
    without = server.post("/v1/completions", {**prompt, **fields, "bad_words": [word]}).json()["choices"][0]
    assert word in free["text"].split() and word not in without["text"].split()
    # Of several tokens: only the last is ruled out, and only after the others.
    two = " ".join(free["text"].split()[1:4])
    again = server.post("/v1/completions", {**prompt, **fields, "bad_words": [two]}).json()["choices"][0]
    assert two in free["text"] and two not in again["text"]
    common = 0
    while free["token_ids"][common] == again["token_ids"][common]:
        common += 1
    assert common > 0, "the same up to the word's last token"


def test_allowed_token_ids(server):
    ids = server.post("/tokenize", {"prompt": " red green blue"}).json()["tokens"]
    for temperature in (0, 1):
        answer = server.chat(allowed_token_ids=ids, max_tokens=12, temperature=temperature, return_token_ids=True).json()
        choice = answer["choices"][0]
        assert set(choice["token_ids"]) <= set(ids) and choice["finish_reason"] == "length"
    # With a mask that leaves nothing the request fails, and says why.
    one = error_of(server.chat(allowed_token_ids=ids[:1], bad_words=[" red", "red"], max_tokens=4), 400, "invalid_value")
    assert "leave no token" in one["message"]


def test_priority_is_taken(server):
    same = [server.chat("Hi", temperature=0, max_tokens=6, priority=p).json()["choices"][0]["message"]["content"]
            for p in (0, -5, 100)]
    assert len(set(same)) == 1


def test_metrics_parse(server):
    server.chat(max_tokens=3)
    text = server.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    parser = pytest.importorskip("prometheus_client.parser")
    families = {f.name: f for f in parser.text_string_to_metric_families(text.text)}
    for name in ("oscar_requests", "oscar_http_responses", "oscar_prompt_tokens", "oscar_generation_tokens",
                 "oscar_requests_running", "oscar_kv_bytes", "oscar_kv_effective_bits", "oscar_build_info",
                 "oscar_time_to_first_token_seconds", "oscar_time_per_output_token_seconds", "oscar_queue_seconds",
                 "oscar_prefill_seconds", "oscar_request_duration_seconds", "oscar_preemptions", "oscar_cancelled",
                 "oscar_prefix_cache_queries", "oscar_prefix_cache_hits", "oscar_model_loaded"):
        assert name in families, name
    for family in families.values():
        if family.type == "histogram":
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == next(s.value for s in family.samples if s.name.endswith("_count"))


def test_metrics_under_vllms_names():
    server = Server("--metrics-compat", "--model-name", 'a "model"').ready()
    try:
        server.chat(max_tokens=3)
        text = server.get("/metrics").text
        parser = pytest.importorskip("prometheus_client.parser")
        families = {f.name: f for f in parser.text_string_to_metric_families(text)}
        assert "oscar_requests" in families, "beside, not instead"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
                     "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
                     "num_preemptions", "time_to_first_token_seconds", "inter_token_latency_seconds",
                     "time_per_output_token_seconds", "request_time_per_output_token_seconds",
                     "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                     "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"):
            family = families[f"vllm:{name}"]
            assert all(s.labels["model_name"] == 'a "model"' and s.labels["engine"] == "0" for s in family.samples)
        reasons = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
        assert reasons == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        assert families["vllm:generation_tokens"].samples[0].value == 3
    finally:
        server.stop()


def test_prefix_cache_shows(server):
    prompt = "Once upon a time there was a fox. " * 40
    first = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0}).json()
    again = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_cache_monitor(server):
    cache = server.get("/v1/oscar/cache").json()
    assert cache["budget_bytes"] == 256 << 20
    assert 0 <= cache["used_bytes"] <= cache["budget_bytes"]
    for sequence in cache["sequences"]:
        assert set(sequence["pages"].lower()) <= set("sqr")


def test_openai_client(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=16)
    chunks = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=16, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert client.completions.create(model="demo", prompt="Hello", max_tokens=4).choices[0].text is not None
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="none", messages=messages)


def test_page_is_served_whole_and_may_load_nothing_else(server):
    for path, kind in {"/": "text/html", "/app.css": "text/css", "/app.js": "text/javascript"}.items():
        response = server.get(path)
        assert response.status_code == 200 and response.headers["content-type"] == kind + "; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    page = server.get("/").text
    assert "<style" not in page and "style=" not in page and "<script src=" in page
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)
    assert "innerHTML" not in server.get("/app.js").text
