"""Answers of a given form: schemas, regular expressions, choices and grammars through the real server."""
import concurrent.futures
import json
import os
import random
import re
import signal
import time

import jsonschema
import pytest

from conftest import Server, wait_until
from schemas import schemas, validate

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"], "additionalProperties": False,
}


def format_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def content(response):
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


def valid(schema, text):
    value = json.loads(text)
    validate(value, schema)
    return value


def terse(server):
    """The demo model likes to tell stories within a string and spaces outside of it: with a liking for what ends values and
    none for blanks most answers end in time."""
    bias = {}
    blanks = [white * count for white in " \n\t" for count in range(1, 33)]
    for text in ['"', '",', '"]', '}', ']', ',', '},', '],', '}}', *blanks]:
        ids = server.post("/tokenize", {"prompt": text}).json()["tokens"]
        if len(ids) == 1:
            bias[str(ids[0])] = 8 if text.strip() else -100
    return bias


def check_schemas(server, cases, temperature, max_tokens, workers=4):
    """Asks for every schema; what is finished validates, and none is refused. How many were finished, and cut."""
    bias = terse(server)

    def ask(case):
        index, (level, schema) = case
        response = server.chat("Answer with data about a person and a city.", response_format=format_of(schema),
                               temperature=temperature, seed=index, max_tokens=max_tokens, logit_bias=bias)
        if response.status_code != 200:
            return "refused", level, schema, response.text
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "length":
            return "cut", level, schema, choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        try:
            valid(schema, choice["message"]["content"])
        except (ValueError, jsonschema.ValidationError) as problem:
            return "wrong", level, schema, f"{choice['message']['content']!r}: {problem}"
        return "finished", level, schema, choice["message"]["content"]

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(ask, enumerate(cases)))
    for kind, level, schema, text in results:
        assert kind not in ("wrong", "refused"), f"level {level}: {json.dumps(schema)}\n{text}"
    return {kind: sum(result[0] == kind for result in results) for kind in ("finished", "cut")}


@pytest.mark.parametrize("temperature", [0, 1])
def test_generated_schemas(server, temperature):
    counts = check_schemas(server, schemas(20, seed=1), temperature, 120)
    assert counts["finished"] >= 10, counts


def test_props_say_what_there_is(server):
    structured = server.get("/props").json()["structured_output"]
    assert structured["available"] is True
    assert structured["compile_seconds"] > 0 and structured["compile_bytes"] > 0


def test_json_object(server):
    for temperature in (0, 1):
        response = server.chat(response_format={"type": "json_object"}, temperature=temperature, seed=3, max_tokens=200,
                               logit_bias={})
        if response.json()["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(content(response)), dict)
        else:
            assert content(response).lstrip().startswith("{")


@pytest.mark.parametrize("fields", [
    {"response_format": format_of(PERSON)},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
    {"guided_json": PERSON},
    {"guided_json": json.dumps(PERSON)},
    {"structured_outputs": {"json": PERSON}},
    {"json_schema": json.dumps(PERSON)},
])
def test_every_way_to_ask_for_a_schema(server, fields):
    for path, prompt in ((CHAT, {"messages": [{"role": "user", "content": "Who?"}]}), (COMPLETIONS, {"prompt": "Who?"})):
        response = server.post(path, {**prompt, **fields, "max_tokens": 200, "temperature": 1, "seed": 5})
        valid(PERSON, content(response))


@pytest.mark.parametrize("name, make", [
    ("guided_regex", lambda text: {"guided_regex": text}),
    ("structured_outputs.regex", lambda text: {"structured_outputs": {"regex": text}}),
    ("regex", lambda text: {"regex": text}),
])
@pytest.mark.parametrize("pattern", [r"[a-z]{3,8}@[a-z]{3,8}\.(com|org)", r"\d{4}-\d{2}-\d{2}", r"(yes|no)( indeed)?",
                                     r"(a|b)*c", r"é{1,3}日本?", r"[^a-z]{2,5}"])
def test_regex(server, name, make, pattern):
    response = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 100, "temperature": 1, "seed": 9, **make(pattern)})
    if response.json()["choices"][0]["finish_reason"] == "stop":
        assert re.fullmatch(pattern, content(response))
    error = error_of(server.post(COMPLETIONS, {"prompt": "x", **make("a(b")}))
    assert error["param"] == name


@pytest.mark.parametrize("fields", [{"guided_choice": ["Paris", "London", "a \"quoted\"\nline"]},
                                    {"structured_outputs": {"choice": ["Paris", "London", "a \"quoted\"\nline"]}}])
def test_choice(server, fields):
    seen = set()
    for seed in range(8):
        seen.add(content(server.chat(**fields, temperature=2, seed=seed, max_tokens=50)))
    assert seen <= {"Paris", "London", "a \"quoted\"\nline"} and seen


GBNF = """
# sums of small numbers
root  ::= expr " = " number
expr  ::= number (" " op " " number){1,3}
op    ::= [-+*]   # one of three
number ::= "-"? [0-9]{1,4}
"""


@pytest.mark.parametrize("field", ["grammar", "guided_grammar", "ebnf", "structured_outputs"])
def test_grammar(server, field):
    fields = {"structured_outputs": {"grammar": GBNF}} if field == "structured_outputs" else {field: GBNF}
    for seed in range(4):
        text = content(server.chat(**fields, temperature=1, seed=seed, max_tokens=80))
        assert re.fullmatch(r"-?\d{1,4}( [-+*] -?\d{1,4}){1,3} = -?\d{1,4}", text)


def test_streamed_as_whole(server):
    fields = {"messages": [{"role": "user", "content": "Who?"}], "response_format": format_of(PERSON), "seed": 4,
              "temperature": 1, "max_tokens": 200}
    whole = server.post(CHAT, fields).json()["choices"][0]
    events = server.stream(**fields)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert text == whole["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    valid(PERSON, text)


def test_seeds_and_choices(server):
    fields = {"response_format": format_of(PERSON), "temperature": 1, "max_tokens": 200, "n": 4}
    first = server.chat(**fields, seed=11).json()["choices"]
    again = server.chat(**fields, seed=11).json()["choices"]
    texts = [choice["message"]["content"] for choice in first]
    assert texts == [choice["message"]["content"] for choice in again]
    assert len(set(texts)) > 1  # each choice has its own state
    for choice in first:
        valid(PERSON, choice["message"]["content"])
    # A choice alone is what it is beside others.
    alone = server.chat(**{**fields, "n": 1}, seed=11).json()["choices"][0]
    assert alone["message"]["content"] == texts[0]


def test_batched_as_alone(server):
    def ask(seed):
        return content(server.chat(response_format=format_of(PERSON), temperature=1, seed=seed, max_tokens=200))

    alone = [ask(seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, range(6)))
    assert alone == together


def test_logprobs_are_the_models_own(server):
    fields = {"temperature": 0, "logprobs": True, "top_logprobs": 5, "max_tokens": 20}
    masked = server.chat(guided_choice=["zebra", "xylophone"], **fields).json()["choices"][0]
    free = server.chat(**fields).json()["choices"][0]
    # The first token was sampled from the same distribution, whatever the mask left of it.
    assert masked["logprobs"]["content"][0]["top_logprobs"] == free["logprobs"]["content"][0]["top_logprobs"]
    assert "".join(entry["token"] for entry in masked["logprobs"]["content"]) == masked["message"]["content"]
    assert all(entry["logprob"] <= 0 for entry in masked["logprobs"]["content"])


def test_stop_strings_and_limits(server):
    choice = server.chat(guided_regex="[a-c]{40}", stop=["b"], temperature=1, seed=2, max_tokens=200).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and "b" not in choice["message"]["content"]
    cut = server.chat(guided_regex="[a-z]{300}", temperature=1, max_tokens=5).json()["choices"][0]
    assert cut["finish_reason"] == "length" and re.fullmatch("[a-z]+", cut["message"]["content"])
    # A complete answer ends, whatever the request would have liked.
    for fields in ({"min_tokens": 30}, {"ignore_eos": True}, {"logit_bias": {"5": 100}}, {"frequency_penalty": 2},
                   {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.5}, {"repetition_penalty": 5}):
        response = server.chat(guided_choice=["yes", "no"], temperature=1, max_tokens=60, **fields)
        assert content(response) in ("yes", "no"), fields
        assert response.json()["choices"][0]["finish_reason"] == "stop"


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "qwen3_coder", "glm45", "minimax_m2", "mistral", "mistral_list", "harmony"])
def test_demanded_calls(start, parser):
    running = start("--max-model-len", 1024, "--tool-parser", parser, "--reasoning-parser", "none").ready()
    schema = TOOLS[0]["function"]["parameters"]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        for temperature in (0, 1):
            fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "temperature": temperature,
                      "seed": 3, "max_tokens": 300, "logit_bias": terse(running)}
            answer = running.chat("What is the weather?", **fields).json()["choices"][0]
            assert answer["finish_reason"] in ("tool_calls", "stop"), answer
            (call,) = answer["message"]["tool_calls"]
            if isinstance(choice, dict):
                assert call["function"]["name"] == "weather"
            assert call["function"]["name"] in ("weather", "now")
            if call["function"]["name"] == "weather":
                valid(schema, call["function"]["arguments"])
            else:
                assert json.loads(call["function"]["arguments"]) == {}
    error = error_of(running.chat(tools=TOOLS, tool_choice="required", guided_regex="a"))
    assert error["param"] == "tool_choice" and "guided_regex" in error["message"]
    refused = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    assert error_of(running.chat(tools=refused, tool_choice="required"))["param"] == "tools"
    assert running.stop() == 0


def parameters(seed):
    """Properties of a tool that every format can write: a generated object without what tags have no form for."""
    rng = random.Random(seed)
    strings = [{"type": "string"}, {"type": "string", "maxLength": 8}, {"enum": ["a b", "5", "true", "x\ny"]},
               {"type": "string", "pattern": "^[a-z]{2,5}$"}, {"type": "string", "format": "date"}, {"type": ["string", "null"]}]
    others = [{"type": "integer", "minimum": -5, "maximum": 300}, {"type": "boolean"}, {"enum": [1, 2.5, None, "one"]},
              {"type": ["integer", "null"]}, {"$ref": "#/$defs/pair"}, {"const": {"a": [1]}},
              {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2}]
    names = rng.sample(["city", "n", "a b", "价格", "x.y", "when"], k=rng.randint(1, 4))
    return {"type": "object", "properties": {name: rng.choice(strings + others) for name in names},
            "required": [name for name in names if rng.random() < 0.7], "additionalProperties": False,
            "$defs": {"pair": {"type": "object", "properties": {"k": {"type": "string", "maxLength": 3}, "v": {"type": "integer"}},
                               "required": ["k", "v"], "additionalProperties": False}}}


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "glm45", "minimax_m2"])
def test_arguments_of_demanded_calls_validate(start, parser):
    running = start("--max-model-len", 1024, "--tool-parser", parser, "--reasoning-parser", "none").ready()
    # What begins the ends of values, so that they are written.
    bias = {**terse(running), **{str(running.post("/tokenize", {"prompt": text}).json()["tokens"][0]): 8 for text in ("<", "</")}}
    finished = 0
    for seed in range(24):
        schema = parameters(seed)
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        answer = running.chat("Call it.", tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=seed % 2,
                              seed=seed, max_tokens=200, logit_bias=bias)
        assert answer.status_code == 200, (schema, answer.text)
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        (call,) = choice["message"]["tool_calls"]
        valid(schema, call["function"]["arguments"])
        assert choice["message"]["content"] is None
        finished += 1
    assert finished >= 12, finished
    assert running.stop() == 0


def test_one_form_at_a_time(server):
    error = error_of(server.chat(response_format=format_of(PERSON), guided_regex="a"))
    assert error["param"] == "guided_regex" and "response_format" in error["message"]
    error = error_of(server.chat(structured_outputs={"regex": "a", "choice": ["b"]}))
    assert error["param"] == "structured_outputs.choice" and "structured_outputs.regex" in error["message"]
    # Null and text are no form.
    assert server.chat(response_format={"type": "text"}, guided_choice=["yes"], grammar="").status_code == 200
    assert server.chat(response_format=None, guided_json=None, structured_outputs={"json": None}).status_code == 200


WRONG = [
    {"response_format": format_of({"type": "object", "properties": {"a": {"not": {}}}})},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 5}}},
    {"guided_json": 5}, {"guided_json": "{"}, {"guided_json": "[]"},
    {"guided_json": {"type": "nothing"}},
    {"guided_json": {"type": "number", "multipleOf": 0.1}},
    {"guided_json": {"$ref": "https://example.org/x"}}, {"guided_json": {"$ref": "#/$defs/none"}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}},
    {"guided_json": {"allOf": [{"type": "object"}, {"type": "string"}]}},
    {"guided_regex": 5}, {"guided_regex": ""}, {"guided_regex": "("}, {"guided_regex": "a(?=b)"}, {"guided_regex": "[z-a]"},
    {"guided_choice": []}, {"guided_choice": [5]}, {"guided_choice": "yes"}, {"guided_choice": [""]},
    {"guided_choice": ["x"] * 5000},
    {"grammar": 5}, {"grammar": "root ::= x"}, {"grammar": "x ::= \"a\""}, {"grammar": "root ::= root"}, {"grammar": "\""},
    {"structured_outputs": 5}, {"structured_outputs": {"shape": 1}}, {"structured_outputs": {"json_object": "x"}},
    {"structured_outputs": {"structural_tag": "x"}},
]


@pytest.mark.parametrize("fields", WRONG, ids=[json.dumps(fields)[:60] for fields in WRONG])
def test_what_is_wrong_is_named(server, fields):
    error = error_of(server.chat(**fields))
    assert error["param"].startswith(next(iter(fields))), error
    assert error["code"] in ("invalid_value", "unsupported_parameter")


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE = {
    "wide": {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    "enum": {"guided_json": {"enum": [f"value {i} {'x' * 20}" for i in range(8000)]}},
    "numbers": {"guided_json": {"enum": list(range(20000))}},
    "deep": {"guided_json": deep(20)},
    "optional": {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(400)},
                                 "additionalProperties": {"type": "object"}}},
    "long": {"guided_json": {"type": "string", "minLength": 100000, "maxLength": 1000000}},
    "many": {"guided_json": {"type": "array", "items": {"type": "array", "items": {"type": "string"}, "minItems": 5000},
                             "minItems": 5000, "maxItems": 100000}},
    "recursion": {"guided_json": {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + j) % 60}"} for j in range(1, 30)]
                                                      + [{"type": "null"}]} for i in range(60)}, "$ref": "#/$defs/d0"}},
    "cycle": {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "nested repeats": {"guided_regex": "(((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}"},
    "catastrophic": {"guided_regex": "(a+)+(a*)*(a|aa)+$"},
    "states": {"guided_regex": "(a|b)*a" + "(a|b)" * 200},
    "classes": {"guided_regex": "[\\u0000-\\U0010ffff]{1,500}[^x]{1,500}\\w{1,500}.{1,500}"},
    "slow masks": {"guided_regex": "(.|a){1,1000}b"},
    "ambiguous": {"grammar": "root ::= e\ne ::= e e | e \"a\" e | \"a\" | \"\""},
    "exponent": {"grammar": "\n".join(["root ::= r0"] + [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30)] + ['r30 ::= "a"?'])},
    "rules": {"grammar": "\n".join(["root ::= r0"] + [f'r{i} ::= "a" r{i + 1} | "b" r{(i * 7) % 5000}' for i in range(5000)]
                                   + ['r5000 ::= "c"'])},
    "repeat": {"grammar": "root ::= ((\"a\" | \"b\"){1,100000}){1,100000}"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_are_bounded(hostile_server, name):
    """Compiled and kept to, or refused: within twice the time that compiling may take, and with the server alive."""
    begun = time.monotonic()
    response = hostile_server.chat(**HOSTILE[name], temperature=1, seed=1, max_tokens=30)
    seconds = time.monotonic() - begun
    print(f"{name}: {response.status_code} after {seconds:.2f} s, {response.text[:150]}")
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == next(iter(HOSTILE[name]))
    assert hostile_server.get("/health").status_code == 200
    assert content(hostile_server.chat(guided_choice=["yes"], max_tokens=9)) == "yes"
    assert memory_of(hostile_server) < 3 << 30


def memory_of(server):
    with open(f"/proc/{server.process.pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read()).group(1)) * 1024


@pytest.fixture(scope="module")
def hostile_server():
    running = Server("--max-model-len", 2048, "--grammar-timeout", 4, "--grammar-cache", "64MiB").ready()
    yield running
    assert running.stop() == 0, running.lines[-5:]


def test_a_worker_that_is_killed_is_started_again(start):
    running = start("--max-model-len", 1024).ready()
    assert content(running.chat(guided_choice=["one"], max_tokens=9)) == "one"
    workers = [int(pid) for task in os.listdir(f"/proc/{running.process.pid}/task")
               for pid in open(f"/proc/{running.process.pid}/task/{task}/children").read().split()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    assert wait_until(lambda: open(f"/proc/{workers[0]}/stat").read().split()[2] == "Z")
    assert content(running.chat(guided_choice=["two"], max_tokens=9)) == "two"
    assert running.stop() == 0
