import http.server
import json
import os
import signal
import subprocess
import threading
import time

import pytest


class Peer(http.server.BaseHTTPRequestHandler):
    """Answers `text`, and prompts that hold "long" with 400 while `strict` is set."""
    strict = True
    text = "ok"
    asked = threading.Event()

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
            self.reply({"choices": [{"message": {"content": self.text}}]})
            self.asked.set()


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_directory_behind(oscar, peer, tmp_path, monkeypatch, number):
    """Nor a score of the program that it ended."""
    started = tmp_path / "temporary"
    started.mkdir()
    monkeypatch.setattr(Peer, "asked", threading.Event())
    sleeper = "import time\ndef f():\n    open('a', 'w').close()\n    time.sleep(60)\n"
    monkeypatch.setattr(Peer, "text", f"```python\n{sleeper}```")
    problem = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    pass\n",
               "test": "def check(candidate):\n    candidate()\n"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    run = subprocess.Popen([oscar.binary, "eval", "--endpoint", peer, "--out", tmp_path / "out",
                            "--suite", f"humaneval={tmp_path}/problems.jsonl"],
                           env={**os.environ, "TMPDIR": str(started)},
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert Peer.asked.wait(60), run.communicate(timeout=1)
        deadline = time.monotonic() + 60
        while not list(started.glob("oscar-sandbox-*/driver.py")) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(started.iterdir()), run.communicate(timeout=1)
        run.send_signal(number)
        output, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == -number, output
    assert list(started.iterdir()) == []
    assert (tmp_path / "out/items.jsonl").read_text() == ""


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


def test_bytes_are_those_after_sealing(oscar, tmp_path):
    oscar("eval", "--kv", "bf16,oscar+", "--tasks", "recall_4k", "--limit", 1, "--text", "none", "--out", tmp_path / "eval")
    results = json.loads((tmp_path / "eval/results.json").read_text())
    took = {method["method"]: method["cache_bytes"] for method in results["methods"]}
    # While the prompt is read its cell is in BF16 on every cache; what counts is what stays.
    assert took["oscar+"] < took["bf16"] / 3


def test_a_sweep_measures_every_point_and_resumes(oscar, tmp_path):
    out = tmp_path / "out"
    command = ("eval", "--kv", "bf16,oscar+@none", "--tasks", "sum", "--limit", 1, "--text", "none", "--strict-only", "--out", out)
    grid = (*command, "--sweep", "sink=0,64", "--sweep", "recent=64,256")
    assert "sweep-oscar+@none-kl.svg" in oscar(*grid).stdout
    results = json.loads((out / "results.json").read_text())
    assert [axis["name"] for axis in results["sweep"]] == ["sink", "recent"]
    labels = [method["method"] for method in results["methods"]]
    assert labels == ["bf16", *(f"oscar+@none sink={s} recent={r}" for s in (0, 64) for r in (64, 256))]
    # More of it in BF16 is more bits.
    bits = [method["stored_bits"]["4096"] for method in results["methods"]]
    assert bits[1] < bits[2] < bits[4] and bits[1] < bits[3] < bits[4]
    items = (out / "items.jsonl").read_text()
    assert "5 of 5 items were measured before" in oscar(*grid).stderr and (out / "items.jsonl").read_text() == items
    # A point is what the same options measure without a sweep.
    alone = tmp_path / "alone"
    oscar(*command[:-1], alone, "--sink", 0, "--recent", 64)
    found = [json.loads(line) for folder in (out, alone) for line in (folder / "items.jsonl").read_text().splitlines()]
    points = [record for record in found if record["method"] in ("oscar+@none sink=0 recent=64", "oscar+@none")]
    assert len(points) == 2 and points[0]["bits"] == points[1]["bits"] and points[0]["reference"] == points[1]["reference"]
    for arguments, why in ((("--sweep", "window=3"), "what is varied"), (("--sweep", "calibration-tokens=600"), "none of the methods"),
                           (("--sweep", "group=48"), "48")):
        assert why in oscar(*command, *arguments, ok=False).stderr


def test_a_sweep_over_calibrations_makes_them(oscar, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The sea was calm and the boats came home late. " * 100)
    out = tmp_path / "out"
    command = ("eval", "--kv", "bf16,oscar", "--tasks", "sum", "--limit", 1, "--text", "none", "--strict-only", "--out", out,
               "--sweep", f"calibration-text=sample,{text}", "--sweep", "calibration-tokens=300,600")
    oscar(*command)
    made = sorted(path.name for path in (out / "calibration").iterdir())
    assert len(made) == 4 and made[0].startswith("300 ") and made[3].startswith("600 ")
    assert len(json.loads((out / "results.json").read_text())["methods"]) == 5
    assert oscar(*command).stderr.count("calibrated before") == 4
