import http.server
import json
import threading

import pytest


class Peer(http.server.BaseHTTPRequestHandler):
    """Answers "ok", and prompts that hold "long" with 400 while `strict` is set."""
    strict = True

    def log_message(self, *args):
        pass

    def reply(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"data": [{"id": "peer"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "long" in request["messages"][-1]["content"] and Peer.strict:
            self.reply({"error": {"message": "too long"}}, 400)
        else:
            self.reply({"choices": [{"message": {"content": "ok"}}]})


@pytest.fixture
def peer():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_failed_requests_never_raise_a_score(oscar, peer, tmp_path):
    suite = tmp_path / "suite"
    suite.mkdir()
    with open(suite / "say.jsonl", "w") as file:
        for i, prompt in enumerate(["short", "long", "longer"]):
            file.write(json.dumps({"id": str(i), "prompt": prompt, "answer": "ok", "max_tokens": 4}) + "\n")
    command = ("eval", "--endpoint", peer, "--suite", suite, "--out", tmp_path / "out")
    run = oscar(*command, ok=False)
    assert "2 of 3 requests have no answer and count as wrong" in run.stderr and "too long" in run.stderr
    assert "33.3*" in run.stdout and "100.0" not in run.stdout
    say = json.loads((tmp_path / "out/results.json").read_text())["methods"][0]["tasks"]["say"]
    assert say["items"] == 3 and say["failed"] == 2
    Peer.strict = False
    run = oscar(*command)
    assert "100.0" in run.stdout and "*" not in run.stdout


@pytest.mark.parametrize("command", [
    ("generate", "--prompt", "x", "--model"), ("generate", "--prompt", "x", "--rotation"), ("generate", "--messages"),
    ("eval", "--suite", "vt", "--out", "nowhere", "--haystack"), ("eval", "--out", "nowhere", "--text"),
    ("zoo", "verify", "nowhere", "--model"), ("tokenize", "--model"),
])
def test_an_empty_value_chooses_no_default(oscar, command):
    """As from a script's variable that is not set."""
    run = oscar(*command, "", ok=False)
    assert run.returncode == 2 and f"{command[-1]}: is empty" in run.stderr


@pytest.mark.parametrize("command", [
    ("eval", "--out", "nowhere", "--suite", "NAME"), ("eval", "--out", "nowhere", "--suite", "longbench-e=NAME"),
    ("report", "NAME"), ("report", "nowhere", "--against", "NAME"), ("inspect", "NAME"),
    ("generate", "--prompt", "x", "--model", "NAME"), ("generate", "--messages", "NAME"), ("zoo", "list", "NAME"),
])
def test_a_name_that_cannot_be_looked_up_is_an_ordinary_error(oscar, command):
    """As one in a directory that is closed to the user."""
    run = oscar(*(part.replace("NAME", "a" * 5000) for part in command), ok=False)
    assert "filesystem error" not in run.stderr
