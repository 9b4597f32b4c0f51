"""Tools against the real server. The demo model calls none; what calls look like is in src/server/tools_test.cc."""
import json
import subprocess

import pytest

from conftest import BINARY, DEMO, Server

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def hermes():
    server = Server("--tool-parser", "hermes", "--reasoning-parser", "none").ready()
    yield server
    server.stop()


def test_parsers_are_chosen_and_shown(server, hermes):
    props = server.get("/props").json()
    # The template names no format; the vocabulary has <think>.
    assert (props["tool_parser"], props["reasoning_parser"]) == ("none", "think")
    assert any("tool parser none, reasoning parser think" in line for line in server.lines), server.lines
    props = hermes.get("/props").json()
    assert (props["tool_parser"], props["reasoning_parser"]) == ("hermes", "none")


def test_an_answer_without_calls_is_the_same_with_tools(server, hermes):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    plain = server.post(CHAT, body).json()["choices"][0]
    for choice in ("auto", "none", None):
        for parallel in (True, False, None):
            answer = hermes.post(CHAT, {**body, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0] == plain


def test_required_calls_name_the_field(server, hermes):
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("required", named):
        error = server.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}).json()["error"]
        assert error["param"] == "tool_choice" and "--tool-parser" in error["message"], error
    error = hermes.post(CHAT, {"messages": MESSAGES, "tools": TOOLS,
                               "tool_choice": {"type": "function", "function": {"name": "sub"}}}).json()["error"]
    assert error["param"] == "tool_choice", error


@pytest.mark.parametrize("options, words", [
    (["--tool-parser", "nonsense"], ["nonsense", "hermes", "qwen3_coder", "harmony"]),
    (["--reasoning-parser", "nonsense"], ["nonsense", "think", "mistral"]),
    (["--tool-parser", "harmony", "--reasoning-parser", "think"], ["harmony", "think"]),
])
def test_parsers_that_do_not_exist(options, words):
    run = subprocess.run([BINARY, "serve", "--model", str(DEMO), "--port", "0", *options], capture_output=True, text=True,
                         timeout=60)
    assert run.returncode != 0
    for word in words:
        assert word in run.stderr, run.stderr


def test_generate_takes_tools(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "messages.json").write_text(json.dumps(MESSAGES))
    command = [BINARY, "generate", "--model", str(DEMO), "--messages", tmp_path / "messages.json", "--json",
               "--max-tokens", "4", "--tools"]
    run = subprocess.run([*map(str, command), str(tmp_path / "tools.json")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "tool_calls" not in json.loads(run.stdout)
    (tmp_path / "tools.json").write_text("[{}]")
    run = subprocess.run([*map(str, command), str(tmp_path / "tools.json")], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0 and "tools[0].function" in run.stderr
