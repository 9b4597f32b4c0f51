"""64 streaming clients of mixed lengths, a third of them leaving at random: every finished answer equals the one
the same request got alone, the budget is never exceeded, nothing leaks, and /health stays quick.

OSCAR_SOAK_SECONDS (180) says how long, OSCAR_SOAK_ARGS what else to serve with. On a GPU answers are those of the
same request alone only with `--device cuda --batch-invariant`."""
import json
import multiprocessing
import os
import pathlib
import random
import sys
import threading
import time

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from conftest import Server, wait_until  # noqa: E402

SECONDS = float(os.environ.get("OSCAR_SOAK_SECONDS", "180"))
CLIENTS = int(os.environ.get("OSCAR_SOAK_CLIENTS", "64"))
ARGS = os.environ.get("OSCAR_SOAK_ARGS", "").split()
TOPICS = ["the sea", "a fox", "old maps", "bread", "winter", "a clock", "rivers", "paper", "stars", "a train"]


def make_request(number):
    rng = random.Random(number)
    words = " ".join(rng.choice(TOPICS) for _ in range(rng.choice([2, 10, 60, 250])))
    return {"messages": [{"role": "user", "content": f"Tell me about {words}."}], "seed": number,
            "temperature": rng.choice([0, 0.8]), "max_tokens": rng.choice([4, 16, 48]), "ignore_eos": True}


def text_of(line):
    event = json.loads(line[6:])
    assert "error" not in event, event
    return event["choices"][0]["delta"].get("content", "") if event["choices"] else ""


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def watch(url, seconds, out):
    """In a process of its own: 64 clients in this one would be what its times show."""
    health, peak, stop = [], 0.0, time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < stop:
            begin = time.monotonic()
            assert client.get("/health").status_code == 200
            health.append(time.monotonic() - begin)
            cache = client.get("/v1/oscar/cache").json()
            peak = max(peak, cache["used_bytes"] / cache["budget_bytes"])
            time.sleep(0.05)
    out.put((health, peak))


def test_load():
    server = Server("--no-prefix-cache", "--max-queue", 256, *ARGS).ready()
    requests = [make_request(i) for i in range(24)]
    with httpx.Client(base_url=server.url, timeout=600) as client:
        expected = [client.post("/v1/chat/completions", json=r).json()["choices"][0]["message"]["content"]
                    for r in requests]
    baseline = server.metrics()["oscar_kv_used_bytes"]
    stop = time.monotonic() + SECONDS
    lock = threading.Lock()
    done, left, wrong, failed = [0], [0], [], []
    watched = multiprocessing.Queue()
    watcher = multiprocessing.Process(target=watch, args=(server.url, SECONDS, watched), daemon=True)
    watcher.start()

    def client_loop(number):
        rng = random.Random(1000 + number)
        with httpx.Client(base_url=server.url, timeout=600) as client:
            while time.monotonic() < stop:
                at = rng.randrange(len(requests))
                leave_after = rng.randrange(1, 12) if rng.random() < 1 / 3 else None
                text, lines = "", 0
                try:
                    with client.stream("POST", "/v1/chat/completions", json={**requests[at], "stream": True}) as r:
                        if r.status_code != 200:
                            failed.append((r.status_code, r.read()))
                            continue
                        for line in r.iter_lines():
                            line = line.strip()
                            if line.startswith("data: {"):
                                text += text_of(line)
                                lines += 1
                            if leave_after is not None and lines >= leave_after:
                                break
                        else:
                            leave_after = None
                except httpx.HTTPError as error:
                    failed.append(repr(error))
                    continue
                with lock:
                    if leave_after is not None:
                        left[0] += 1
                    else:
                        done[0] += 1
                        if text != expected[at]:
                            wrong.append((at, text, expected[at]))

    threads = [threading.Thread(target=client_loop, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    health, peak = watched.get(timeout=60)
    print(f"{done[0]} finished, {left[0]} left, {len(wrong)} wrong, {len(failed)} failed; "
          f"health p50 {percentile(health, .5) * 1e3:.1f} ms, p99 {percentile(health, .99) * 1e3:.1f} ms; "
          f"peak cache {100 * peak:.1f}%")
    assert not wrong, wrong[0]
    assert not failed, failed[0]
    assert done[0] > CLIENTS / 4 and left[0] > 0
    assert peak <= 1.0
    assert wait_until(lambda: server.metrics()["oscar_requests_running"] == 0, 30)
    assert server.metrics()["oscar_kv_used_bytes"] == baseline
    assert percentile(health, 0.99) < 0.1
    assert server.stop() == 0
