"""`oscar demo` on the embedded model: what the first command of the README ends with."""
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import time

import httpx
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("OSCAR_BIN", str(ROOT / "build/release/oscar"))


@pytest.fixture(scope="module")
def plain():
    """Not a terminal, and the server afterwards: one run for most of the tests."""
    process = subprocess.Popen([BINARY, "demo", "--serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors = []
    for line in process.stderr:
        errors.append(line)
        if "oscar: ready" in line:
            break
    url = re.search(r"http://[^ ]*:\d+", errors[-1]).group(0)
    page = httpx.get(url + "/", timeout=30)
    process.send_signal(signal.SIGTERM)
    out, rest = process.communicate(timeout=60)
    return {"out": out, "err": "".join(errors) + rest, "page": page, "code": process.returncode}


def test_serve_leaves_the_server_running(plain):
    assert plain["page"].status_code == 200 and "<title>oscar</title>" in plain["page"].text
    assert plain["code"] == 0


def test_plain_lines_say_everything(plain):
    assert "\x1b" not in plain["out"] and "\r" not in plain["out"]
    rows = {}
    for name in ("BF16", "naive INT2", "OSCAR as published", "oscar+ (default)"):
        row = re.search(rf"^{re.escape(name)} +([\d.]+) MiB +([\d.]+) .*?(\d) of 8 +(\d+)$", plain["out"], re.M)
        assert row, (name, plain["out"])
        rows[name] = [float(value) for value in row.groups()]
    bf16, naive, ours = rows["BF16"], rows["naive INT2"], rows["oscar+ (default)"]
    assert bf16[1] == 16.0 and 2.2 < ours[1] < 2.8 and bf16[0] / ours[0] > 5
    # The demo is about this: two bits lose answers, unless they are the right two.
    assert bf16[2] == 8 and ours[2] >= 7 and naive[2] < ours[2]
    assert all(row[3] > 0 for row in rows.values())


def test_live_table_on_a_terminal_and_how_it_ends():
    leader, follower = pty.openpty()
    process = subprocess.Popen([BINARY, "demo"], stdout=follower, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(follower)
    out, deadline = b"", time.monotonic() + 600
    while time.monotonic() < deadline:
        if not select.select([leader], [], [], 1)[0]:
            continue
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        out += data
    assert process.wait(30) == 0
    text = out.decode()
    assert text.count("\x1b[4A") > 10  # drawn over itself
    end = text.replace("\r\n", "\n").rstrip().splitlines()
    assert end[-1] == "then open http://127.0.0.1:8000/" and end[-2].endswith(" serve")


def test_json():
    result = subprocess.run([BINARY, "demo", "--json"], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    demo = json.loads(result.stdout)
    assert demo["text_tokens"] > 12000
    assert [m["kv"] for m in demo["methods"]] == ["bf16", "naive", "oscar", "oscar+"]
    for method in demo["methods"]:
        right = sum(a["answer"].strip() == a["expected"] for a in method["answers"])
        assert method["right"] == right and method["questions"] == len(method["answers"]) == 8
