"""Every cache method holds what it says: the memory plan, /v1/oscar/cache and the process's resident memory agree."""
import json
import re
import subprocess

import pytest

from conftest import BINARY, DEMO, Server

TEXT = (DEMO / "eval/haystack.txt").read_text()
SLACK = 12 << 20  # of the allocator and of buffers that a longer prompt needs


def resident(server):
    status = open(f"/proc/{server.process.pid}/status").read()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024


@pytest.mark.parametrize("kv", ["bf16", "naive", "naive-sym", "quarot", "saw-int4", "turboquant", "turboquant-skip", "kivi", "kivi-sink", "oscar-su",
                                "oscar-su:norm=head:bits=3", "kitty", "lloyd-max", "oscar", "oscar+"])
def test_plan_monitor_and_resident_memory_agree(kv):
    method = ["--kv", kv, *(["--prefill-cell", "64"] if kv != "bf16" else []), *(["--rotation", DEMO / "rotation"] if kv == "oscar" else [])]
    server = Server(*method).ready()
    try:
        # Buffers of a pass are there after the first.
        server.post("/v1/completions", {"prompt": TEXT[-4000:], "max_tokens": 1, "temperature": 0})
        before = resident(server)
        asked = server.post("/v1/completions", {"prompt": TEXT[:18000], "max_tokens": 1, "temperature": 0}).json()
        grown = resident(server) - before
        shown = server.get("/v1/oscar/cache").json()
    finally:
        server.stop()
    tokens = asked["usage"]["prompt_tokens"]
    held = next(sequence for sequence in shown["sequences"] if sequence["tokens"] == tokens)
    run = subprocess.run([BINARY, "serve", "--model", DEMO, "--dry-run", "--json", "--kv-memory", "256MiB", "--plan-tokens", str(tokens), *method],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert held["bits_per_element"] == pytest.approx(plan["bits_per_element"])
    # The plan counts tokens, the monitor whole pages: rows of the newest that are free yet.
    pages = -(-tokens // 64)
    assert held["open_pages"] + held["sealed_pages"] == pages
    free = (64 * pages - tokens) * plan["open_page_bytes"] // 64
    assert held["bytes"] == plan["conversation_bytes"] + free
    assert shown["used_bytes"] == sum(sequence["bytes"] for sequence in shown["sequences"])
    # Nothing is kept beside the pages: copies in BF16 would show.
    assert grown <= held["bytes"] + SLACK
    assert kv == "bf16" or held["bytes"] + SLACK < held["bf16_bytes"]
