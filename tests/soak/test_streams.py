"""Two thousand open streams on one server: each is answered, each takes little memory, /health stays quick, and a
SIGTERM in the middle loses no answer. One process of its own drives all of them (asyncio).

OSCAR_SOAK_STREAMS (2000) says how many."""
import asyncio
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import time

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from conftest import http_request, start, wait_until  # noqa: E402,F401

STREAMS = int(os.environ.get("OSCAR_SOAK_STREAMS", "2000"))
TOKENS = 16
OPTIONS = ("--no-prefix-cache", "--shutdown-timeout", 600)


def resident(server):
    text = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    values = dict(line.split(":", 1) for line in text.splitlines())
    return int(values["VmRSS"].split()[0]) * 1024, int(values["Threads"])


def drive(port, count, out):
    """Opens `count` streams at once; puts one (status, tokens, done) for each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    async def one(number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(http_request("/v1/completions", {
            "prompt": f"Story number {number} begins", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 0}, "Connection: close\r\n"))
        data = await reader.read()
        writer.close()
        status = int(data.split(b" ", 2)[1]) if data else 0
        usage = [json.loads(line[6:])["usage"] for line in data.split(b"\n") if b'"usage":{' in line]
        return status, usage[-1]["completion_tokens"] if usage else 0, b"data: [DONE]" in data

    async def everyone():
        return await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True)

    out.put([repr(r) if isinstance(r, BaseException) else r for r in asyncio.run(everyone())])


def watch(url, stop, out):
    """Times of /health, in a process of its own."""
    times = []
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            begin = time.monotonic()
            assert client.get("/health").status_code in (200, 503)
            times.append(time.monotonic() - begin)
            time.sleep(0.02)
    out.put(times)


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def start_driver(server, count):
    out = multiprocessing.Queue()
    process = multiprocessing.Process(target=drive, args=(server.port, count, out), daemon=True)
    process.start()
    return process, out


def open_requests(server):
    values = server.metrics()
    return values["oscar_requests_running"] + values["oscar_requests_waiting"]


def test_thousands_of_streams(start):
    server = start(*OPTIONS).ready()
    # One that waits behind nobody, for its memory and to warm up.
    for _ in range(2):
        process, out = start_driver(server, 64)
        assert all(r == (200, TOKENS, True) for r in out.get(timeout=600))
        process.join()
    one, threads_before = resident(server)
    stop, times = multiprocessing.Event(), multiprocessing.Queue()
    watcher = multiprocessing.Process(target=watch, args=(server.url, stop, times), daemon=True)
    watcher.start()
    begin = time.monotonic()
    process, out = start_driver(server, STREAMS)
    most, most_open, threads = 0, 0, 0
    while process.is_alive() and out.empty():
        waiting = open_requests(server)
        most_open = max(most_open, waiting)
        memory, now = resident(server)
        most, threads = max(most, memory), max(threads, now)
        time.sleep(0.1)
    results = out.get(timeout=600)
    took = time.monotonic() - begin
    stop.set()
    health = times.get(timeout=60)
    per_stream = (most - one) / STREAMS
    print(f"{STREAMS} streams in {took:.1f} s, {most_open:.0f} open at once, {threads} threads ({threads_before} before); "
          f"{per_stream / 1024:.1f} KiB per stream; health p50 {percentile(health, .5) * 1e3:.1f} ms, "
          f"p99 {percentile(health, .99) * 1e3:.1f} ms, worst {max(health) * 1e3:.1f} ms of {len(health)}")
    assert [r for r in results if r != (200, TOKENS, True)] == []
    assert most_open > 0.9 * STREAMS
    assert threads == threads_before
    assert per_stream < 64 * 1024
    assert percentile(health, 0.99) < 0.05
    assert wait_until(lambda: open_requests(server) == 0, 30)
    assert server.stop() == 0


def test_a_drain_under_load_loses_no_answer(start):
    server = start(*OPTIONS).ready()
    process, out = start_driver(server, STREAMS)
    assert wait_until(lambda: open_requests(server) > 0.9 * STREAMS, 120)
    server.signal()
    begin = time.monotonic()
    results = out.get(timeout=600)
    print(f"drained {STREAMS} streams in {time.monotonic() - begin:.1f} s")
    assert [r for r in results if r != (200, TOKENS, True)] == []
    assert server.process.wait(30) == 0
    assert any("all requests have ended" in line for line in server.lines)
