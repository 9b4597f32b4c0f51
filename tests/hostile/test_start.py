"""Starts that must fail, and starts that must not."""
import os
import pathlib
import subprocess
import sys
import time

import httpx
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from conftest import BINARY, DEMO, start, wait_until  # noqa: E402,F401


def run(*args, env=None):
    """A server that should end by itself; one that starts is the failure."""
    command = [BINARY, "serve", "--model", str(DEMO), "--port", "0", "--kv-memory", "64MiB", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, env={**os.environ, **(env or {})})


@pytest.mark.parametrize("args,env,named", [
    (("--api-key", ""), {}, "--api-key"),
    (("--api-key", "good", "--api-key", ""), {}, "--api-key"),
    (("--api-key-file", ""), {}, "--api-key-file"),
    ((), {"OSCAR_API_KEY": ""}, "OSCAR_API_KEY"),
    ((), {"OSCAR_API_KEY_FILE": ""}, "OSCAR_API_KEY_FILE"),
    (("--api-key", "good"), {"OSCAR_API_KEY": ""}, "OSCAR_API_KEY"),
    (("--isolate-keys",), {}, "--isolate-keys"),
])
def test_an_empty_key_is_no_open_door(args, env, named):
    ended = run(*args, env=env)
    assert ended.returncode == 2, ended.stderr
    assert named in ended.stderr and "oscar: ready" not in ended.stderr
    assert ";" in ended.stderr  # and what to do about it


def test_an_empty_key_file_is_no_open_door(tmp_path):
    keys = tmp_path / "keys"
    for text in ("", "\n\n", "# none yet\n"):
        keys.write_text(text)
        ended = run("--api-key-file", keys)
        assert ended.returncode == 2, ended.stderr
        assert str(keys) in ended.stderr and "one key per line" in ended.stderr


def test_an_empty_key_in_a_config_file(tmp_path):
    config = tmp_path / "oscar.toml"
    for line in ('api-key = ""', 'api-key-file = ""', 'api-key = [""]'):
        config.write_text(f"[serve]\n{line}\n")
        command = [BINARY, "--config", str(config), "serve", "--model", str(DEMO), "--port", "0"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert ended.returncode == 2, (line, ended.stderr)


def test_a_log_that_cannot_be_written_does_not_end_the_server(tmp_path):
    config = [BINARY, "serve", "--model", str(DEMO), "--port", "0", "--kv-memory", "64MiB"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(config, stderr=full)
    try:
        port = None
        deadline = time.monotonic() + 30
        while port is None and time.monotonic() < deadline and process.poll() is None:
            port = listening_port(process.pid)
            time.sleep(0.05)
        assert process.poll() is None and port is not None
        url = f"http://127.0.0.1:{port}"
        assert wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 60)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=60)
        assert answer.status_code == 200
        assert process.poll() is None
    finally:
        process.terminate()
    assert process.wait(20) == 0


def listening_port(pid):
    """The port of the one socket that the process listens on, from /proc."""
    inodes = set()
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for line in pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].split(":")[1], 16)
    return None
