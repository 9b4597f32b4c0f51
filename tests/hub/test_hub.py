"""Models by name, against a hub that behaves well or badly: a complete, checked file or a clear error."""
import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import subprocess
import threading

import pytest

from fake_hub import Hub
from hub_fixtures import BINARY

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "oscar-test/tiny"
MIB = 1 << 20


def random_bytes(seed, size):
    return random.Random(seed).randbytes(size)


def sharded():
    """Two shards that are no safetensors: pull checks bytes, loading checks formats."""
    shards = {f"model-0000{i}-of-00002.safetensors": random_bytes(i, 3 * MIB + 17 * i) for i in (1, 2)}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    return {"config.json": b'{"model_type": "llama"}', "generation_config.json": b"{}",
            "tokenizer.json": random_bytes(7, 5000), "tokenizer_config.json": b"{}",
            "model.safetensors.index.json": json.dumps(index).encode(),
            "rotation/sensitivity.json": b"{}", "README.md": b"# no", "pytorch_model.bin": b"no",
            "original/consolidated.00.pth": b"no", "extra.safetensors": b"no", **shards}


WANTED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "model.safetensors.index.json", "rotation/sensitivity.json", "model-00001-of-00002.safetensors",
          "model-00002-of-00002.safetensors"}


def repository(cache, name=NAME):
    return cache / ("models--" + name.replace("/", "--"))


def check_snapshot(directory, files, wanted=WANTED):
    directory = pathlib.Path(directory)
    found = {str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()}
    assert found == set(wanted)
    for name in wanted:
        assert (directory / name).read_bytes() == files[name], name
        assert (directory / name).is_symlink()
        target = os.readlink(directory / name)
        assert target == "../" * (2 + name.count("/")) + "blobs/" + os.path.basename(target)
    assert not list(directory.parents[1].glob("blobs/*.incomplete"))


@pytest.fixture
def files(hub):
    files = sharded()
    hub.add(NAME, files)
    return files


def test_pull_makes_the_hubs_layout(hub, files, oscar, cache):
    run = oscar("pull", NAME)
    directory = run.stdout.strip()
    assert directory == str(repository(cache) / "snapshots" / ("1" * 40))
    check_snapshot(directory, files)
    assert (repository(cache) / "refs/main").read_text() == "1" * 40
    for path, data in files.items():
        if path in WANTED:
            blob = repository(cache) / "blobs" / hub.repositories[NAME]["main"].digest(path)
            assert blob.read_bytes() == data and not blob.is_symlink()
    # Large files came over the CDN, each once; what is not read did not come at all.
    assert len(hub.paths("cdn")) == 3
    assert not [p for p in hub.paths() if "README" in p or "pytorch" in p or "original" in p or "extra" in p]
    hub.requests.clear()
    assert oscar("pull", NAME, "--json").stdout == json.dumps(
        {"name": NAME, "commit": "1" * 40, "directory": directory}, separators=(",", ":")) + "\n"
    assert len(hub.requests) == 1, "only the listing"


def test_the_token_stays_with_the_hub(hub, files, oscar, env, tmp_path):
    hub.token = "hf_secret"
    for place in ("variable", "file", "home"):
        hub.requests.clear()
        shutil.rmtree(env["HF_HUB_CACHE"], ignore_errors=True)
        more = {}
        if place == "variable":
            more = {"HF_TOKEN": " hf_secret\n"}
        elif place == "file":
            (tmp_path / "token").write_text("hf_secret\n")
            more = {"HF_TOKEN_PATH": str(tmp_path / "token")}
        else:
            home = tmp_path / "home/.cache/huggingface"
            home.mkdir(parents=True)
            (home / "token").write_text("hf_secret")
        run = oscar("pull", NAME, more=more)
        check_snapshot(run.stdout.strip(), files)
        assert "hf_secret" not in run.stderr
        for role, _, _, headers in hub.requests:
            assert ("Authorization" in headers) == (role == "hub")
    oscar("pull", NAME, more={"HF_TOKEN": "a\tb"}, ok=False)


@pytest.mark.parametrize("gated,refusal,token,expected", [
    (True, 401, None, "a gated model: accept its terms at"),
    (True, 403, "wrong", "your token has no access"),
    (False, 401, None, "no such model, or it is private"),
    (False, 401, "wrong", "private and the token may not read it"),
])
def test_refusals_say_what_to_do(hub, files, oscar, gated, refusal, token, expected):
    hub.token, hub.gated, hub.refusal = "right", gated, refusal
    run = oscar("pull", NAME, more={"HF_TOKEN": token} if token else {}, ok=False)
    assert expected in run.stderr and "HF_TOKEN" in run.stderr or "token" in run.stderr
    assert run.stderr.count("\n") == 1 and "wrong" not in run.stderr


def test_names_that_are_not_there(hub, files, oscar):
    assert "no such model" in oscar("pull", "oscar-test/other", ok=False).stderr
    assert "no revision 'v9'" in oscar("pull", NAME + "@v9", ok=False).stderr
    for name in ("tiny", "../x/y", "a/b/c", "a/b@../c", "/etc/passwd"):
        run = oscar("pull", name, ok=False)
        assert run.returncode == 2 and "not a name on the hub" in run.stderr
    # The hub's own 404 of a file that it lists.
    hub.faults = [("/resolve/", 404, {"X-Error-Code": "EntryNotFound"}, b"")] * 9
    assert "is not on 127.0.0.1" in oscar("pull", NAME, ok=False).stderr


def test_a_connection_cut_at_every_megabyte(hub, files, oscar):
    hub.cut = MIB
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)
    ranges = [h.get("Range") for r, _, _, h in hub.requests if r == "cdn"]
    assert len(ranges) >= 9 and f"bytes={2 * MIB}-" in ranges


def test_a_second_run_finishes_an_interrupted_one(hub, files, oscar, cache):
    hub.cut_total = 2 * MIB  # then every connection ends without a byte
    run = oscar("pull", NAME, ok=False)
    assert "gave up after 6 attempts" in run.stderr
    left = sum(p.stat().st_size for p in repository(cache).glob("blobs/*.incomplete"))
    assert MIB < left <= 2 * MIB
    assert not (repository(cache) / "refs/main").exists(), "a name leads to complete files alone"
    hub.cut_total = 0
    hub.requests.clear()
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)
    assert any(h.get("Range") for r, _, _, h in hub.requests if r == "cdn")


def test_a_killed_run_is_finished_by_the_next(hub, files, oscar, cache):
    reached, leave = threading.Event(), threading.Event()

    def gate(path):
        reached.set()
        leave.wait(60)

    hub.gate = gate
    process = oscar.start("pull", NAME)
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    hub.gate = lambda path: None
    leave.set()
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_a_link_that_cannot_be_made_leaves_nothing_in_the_snapshot(hub, files, oscar, cache):
    snapshot = pathlib.Path(oscar("pull", NAME).stdout.strip())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json/in the way").mkdir(parents=True)
    assert "config.json: cannot link" in oscar("pull", NAME, ok=False).stderr
    assert not [p.name for p in snapshot.iterdir() if p.name.startswith(".")]
    (snapshot / "config.json/in the way").rmdir()
    (snapshot / "config.json").rmdir()
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_a_server_without_ranges(hub, files, oscar, cache):
    hub.cut_total = 2 * MIB
    oscar("pull", NAME, ok=False)
    hub.cut_total, hub.ranges = 0, False
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_a_server_without_ranges_that_cuts_is_an_error(hub, files, oscar):
    hub.cut, hub.ranges = MIB, False
    # Each attempt brings the same first megabyte: that must end.
    run = oscar("pull", NAME, ok=False)
    assert "gave up after" in run.stderr


def test_a_server_that_does_not_say_lengths(hub, files, oscar):
    hub.lengths = False
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)
    # Without a length the end of a connection looks like the end of the file: sizes decide.
    hub.cut = MIB
    shutil.rmtree(pathlib.Path(oscar("pull", NAME).stdout.strip()).parents[1])
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_a_range_that_is_not_the_one_asked_for(hub, files, oscar):
    hub.cut, hub.lies_about_range = MIB, True
    assert "asked for bytes from 1048576" in oscar("pull", NAME, ok=False).stderr


def test_wrong_bytes_are_never_kept(hub, files, oscar, cache):
    hub.wrong = 100
    run = oscar("pull", NAME, ok=False)
    assert "not those that the hub lists" in run.stderr
    for blob in repository(cache).glob("blobs/*"):
        if not blob.name.endswith(".incomplete"):
            assert blob.stat().st_size < 5000, "no large file is complete"
    hub.wrong = 1  # once: the next attempt brings the right ones
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_a_partial_file_of_other_bytes_is_thrown_away(hub, files, oscar, cache):
    digest = hub.repositories[NAME]["main"].digest("model-00001-of-00002.safetensors")
    blobs = repository(cache) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.incomplete").write_bytes(b"x" * MIB)
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)
    # Longer than the file, or a whole one that is wrong.
    for junk in (b"x" * 9 * MIB, b"x" * len(files["model-00001-of-00002.safetensors"])):
        shutil.rmtree(repository(cache))
        blobs.mkdir(parents=True)
        (blobs / f"{digest}.incomplete").write_bytes(junk)
        check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_more_bytes_than_listed(hub, files, oscar):
    hub.trailing, hub.lengths = True, False
    assert "more than the" in oscar("pull", NAME, ok=False).stderr


def test_a_size_other_than_listed(hub, files, oscar):
    repo = hub.repositories[NAME]["main"]
    listing = json.dumps({"sha": repo.commit, "siblings": [
        {"rfilename": "config.json", "size": 3, "blobId": repo.digest("config.json")},
        {"rfilename": "model.safetensors", "size": 3, "blobId": "0" * 40}]}).encode()
    hub.listing = listing
    assert "where the hub lists 3" in oscar("pull", NAME, ok=False).stderr


def test_a_slow_server(hub, files, oscar):
    hub.piece = 1000
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


@pytest.mark.parametrize("status,headers", [
    (429, {"Retry-After": "0"}), (429, {"RateLimit": '"resolvers";r=0;t=0'}), (503, {"Retry-After": "0"}),
    (500, {"Retry-After": "0"}),
])
def test_passing_refusals_are_tried_again(hub, files, oscar, status, headers):
    hub.faults = [("/api/", status, headers, b"")] * 3 + [("/resolve/", status, headers, b"")] * 3
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_signed_addresses_that_have_expired(hub, files, oscar):
    digest = hub.repositories[NAME]["main"].digest("model-00001-of-00002.safetensors")
    hub.token = "right"
    hub.faults = [(digest, 403, {}, b"<Error>Request has expired</Error>")] * 3
    check_snapshot(oscar("pull", NAME, more={"HF_TOKEN": "right"}).stdout.strip(), files)
    shutil.rmtree(pathlib.Path(oscar("pull", NAME, more={"HF_TOKEN": "right"}).stdout.strip()).parents[1])
    hub.faults = [(digest, 403, {}, b"")] * 6
    run = oscar("pull", NAME, more={"HF_TOKEN": "right"}, ok=False)
    assert "the storage that 127.0.0.1 sends on to answers with status 403" in run.stderr, "nobody blames the token"


def test_refusals_that_do_not_pass_end(hub, files, oscar):
    hub.faults = [("/api/", 429, {"Retry-After": "86400"}, b"")]
    run = oscar("pull", NAME, ok=False)
    assert "too many requests" in run.stderr and "86400 s" in run.stderr and "HF_TOKEN" in run.stderr
    hub.faults = [("/api/", 502, {"Retry-After": "0"}, b"<html>")] * 6
    assert "status 502" in oscar("pull", NAME, ok=False).stderr


def test_where_redirects_may_not_lead(hub, files, oscar):
    for location, expected in ((hub.url + "/" + NAME + "/resolve/main/tokenizer.json", "more than 5 times"),
                               ("file:///etc/passwd", "is no address"), ("", "")):
        hub.location = location or None
        if location:
            assert expected in oscar("pull", NAME, ok=False).stderr
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_a_renamed_repository(hub, files, oscar, env):
    hub.add("old/name", files)
    hub.faults = [("/api/models/old/name", 307, {"Location": f"/api/models/{NAME}/revision/main?blobs=true"}, b"")]
    check_snapshot(oscar("pull", "old/name").stdout.strip(), files)


@pytest.mark.parametrize("path", ["../../../evil.safetensors", "/etc/evil", "a/../../evil", "a\\..\\evil", "a\nb"])
def test_hostile_listings(hub, files, oscar, cache, path):
    hub.listing = json.dumps({"sha": "1" * 40, "siblings": [{"rfilename": "config.json"}, {"rfilename": path}]}).encode()
    assert "no name of a file" in oscar("pull", NAME, ok=False).stderr
    assert not list(cache.rglob("*evil*")) and not list(cache.parent.rglob("evil*"))


@pytest.mark.parametrize("listing,expected", [
    (b"<html>", "api/models"), (b"[" * 1000, "api/models"), (b"{}", "not the answer of a hub"),
    (b'{"sha": "../../x", "siblings": []}', "not the answer of a hub"),
    (json.dumps({"sha": "1" * 40, "siblings": [{"rfilename": "x"}], "pad": "y" * (33 << 20)}).encode(), "more than"),
    (json.dumps({"sha": "1" * 40, "siblings": [{"rfilename": "README.md"}]}).encode(), "holds no config.json"),
    (json.dumps({"sha": "1" * 40, "siblings": [{"rfilename": "m.gguf"}]}).encode(), "GGUF"),
    (json.dumps({"sha": "1" * 40, "siblings": [{"rfilename": "config.json"}, {"rfilename": "model.bin"}]}).encode(),
     "weights in other formats"),
], ids=["html", "deep", "empty", "commit", "long", "readme", "gguf", "bin"])
def test_listings_that_are_none(hub, files, oscar, listing, expected):
    hub.listing = listing
    assert expected in oscar("pull", NAME, ok=False).stderr


def test_an_index_that_leaves_its_folder(hub, oscar, cache):
    index = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    hub.add(NAME, {"config.json": b"{}", "model.safetensors.index.json": index})
    assert "not a plain file name" in oscar("pull", NAME, ok=False).stderr
    index = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()
    hub.add(NAME, {"config.json": b"{}", "model.safetensors.index.json": index}, commit="2" * 40)
    assert "does not hold" in oscar("pull", NAME, ok=False).stderr


def test_a_mirror_whose_listing_has_no_digests(hub, files, oscar):
    hub.blobs = False
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)
    assert hub.paths("hub", "HEAD") and not hub.paths("cdn", "HEAD"), "what is signed for GET refuses HEAD"


def test_another_commit_shares_what_is_the_same(hub, files, oscar, cache):
    oscar("pull", NAME)
    newer = files | {"config.json": b'{"model_type": "llama", "new": 1}'}
    hub.add(NAME, newer, commit="2" * 40)
    hub.add(NAME, files, revision="v1", commit="1" * 40)
    hub.requests.clear()
    directory = oscar("pull", NAME).stdout.strip()
    assert directory.endswith("2" * 40)
    check_snapshot(directory, newer)
    assert len(hub.paths()) == 2, "the listing and the one file that changed"
    assert (repository(cache) / "refs/main").read_text() == "2" * 40
    # The earlier one, by tag and by commit.
    assert oscar("pull", NAME + "@v1").stdout.strip().endswith("1" * 40)
    assert (repository(cache) / "refs/v1").read_text() == "1" * 40
    assert oscar("pull", f"{NAME}@{'2' * 40}").stdout.strip() == directory
    assert not (repository(cache) / "refs" / ("2" * 40)).exists()


def test_two_at_once(hub, files, oscar):
    """The second waits for the first's lock on a blob; both end with the same complete files."""
    barrier = threading.Event()
    waiting = []

    def gate(path):
        waiting.append(path)
        barrier.wait(120)

    hub.gate = gate
    one, two = oscar.start("pull", NAME), oscar.start("pull", NAME)
    # Both are there once one of them says that it waits for the other.
    said = threading.Event()
    threads = []
    lines = []
    for process in (one, two):
        def read(process=process):
            for line in process.stderr:
                lines.append(line)
                if "another process is downloading it" in line:
                    said.set()
        threads.append(threading.Thread(target=read))
        threads[-1].start()
    assert said.wait(120), lines
    barrier.set()
    outputs = [p.stdout.read().strip() for p in (one, two)]
    for thread in threads:
        thread.join()
    assert one.wait(120) == 0 and two.wait(120) == 0, lines
    assert outputs[0] == outputs[1]
    check_snapshot(outputs[0], files)
    assert len(hub.paths("cdn")) == 3, "no byte twice"


def test_offline(hub, files, oscar, env):
    for args, more in ((["--offline"], {}), ([], {"HF_HUB_OFFLINE": "1"}), ([], {"TRANSFORMERS_OFFLINE": "true"})):
        run = oscar("pull", NAME, *args, more=more, ok=False)
        assert "and offline" in run.stderr and f"oscar pull {NAME}" in run.stderr
    assert hub.requests == []
    directory = oscar("pull", NAME).stdout
    hub.requests.clear()
    assert oscar("pull", NAME, "--offline").stdout == directory
    os.remove(pathlib.Path(directory.strip()) / "model-00002-of-00002.safetensors")
    run = oscar("pull", NAME, "--offline", ok=False)
    assert "lacks 'model-00002-of-00002.safetensors'" in run.stderr
    assert hub.requests == []


def test_nobody_answers(oscar):
    # A port that nothing listens at: bound and closed again.
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        run = oscar("pull", NAME, more={"HF_ENDPOINT": f"http://127.0.0.1:{port}"}, ok=False)
    assert "cannot be reached" in run.stderr
    for endpoint in ("nonsense", "ftp://x", "https://user:pw@x"):
        assert "HF_ENDPOINT" in oscar("pull", NAME, more={"HF_ENDPOINT": endpoint}, ok=False).stderr


def test_a_cache_that_cannot_be_written(files, oscar, tmp_path):
    (tmp_path / "file").write_text("")
    run = oscar("pull", NAME, more={"HF_HUB_CACHE": str(tmp_path / "file/below")}, ok=False)
    assert "cannot make the folder" in run.stderr


def test_more_than_the_disk_holds_is_refused_at_once(hub, files, oscar):
    hub.listing = json.dumps({"sha": "1" * 40, "siblings": [
        {"rfilename": "config.json", "size": 1 << 62, "blobId": "0" * 40}]}).encode()
    run = oscar("pull", NAME, "--no-weights", ok=False)
    assert "still to come" in run.stderr and "HF_HUB_CACHE" in run.stderr
    assert len(hub.requests) == 1


def test_a_disk_that_fills_up_on_the_way(hub, files, oscar, env):
    """A limit on the size of files stands for the end of the disk; the next run continues."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))

    run = subprocess.run([BINARY, "pull", NAME], env=env, preexec_fn=limit, capture_output=True, text=True)
    assert run.returncode == 1 and "no room for more" in run.stderr and "continues" in run.stderr
    hub.requests.clear()
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)
    assert any(h.get("Range") for r, _, _, h in hub.requests if r == "cdn")


def test_a_link_in_place_of_the_partial_file_is_not_followed(hub, files, oscar, cache, tmp_path):
    digest = hub.repositories[NAME]["main"].digest("model-00001-of-00002.safetensors")
    blobs = repository(cache) / "blobs"
    blobs.mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", blobs / f"{digest}.incomplete")
    assert "cannot create" in oscar("pull", NAME, ok=False).stderr
    assert not (tmp_path / "elsewhere").exists()


def test_https(oscar, tmp_path):
    pem = tmp_path / "hub.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", pem, "-out",
                    tmp_path / "hub.crt", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "hub.crt").read_text())
    secure = Hub(certificate=pem)
    try:
        files = sharded()
        secure.add(NAME, files, lfs_from=1 << 40)
        more = {"HF_ENDPOINT": secure.url, "HF_TOKEN": "hf_secret"}
        run = oscar("pull", NAME, more=more, ok=False)
        assert "certificate is not trusted" in run.stderr and "SSL_CERT_FILE" in run.stderr
        assert secure.requests == [], "nothing was said to a stranger"
        more["SSL_CERT_FILE"] = str(tmp_path / "hub.crt")
        check_snapshot(oscar("pull", NAME, more=more).stdout.strip(), files)
        # From there to a host without TLS: never.
        secure.add("oscar-test/other", files)
        assert "is not encrypted" in oscar("pull", "oscar-test/other", more=more, ok=False).stderr
        assert secure.paths("cdn") == []
    finally:
        secure.close()


def test_a_proxy(hub, oscar):
    """The hub stands for the proxy: it sees whole addresses of a host that only a proxy could know."""
    files = sharded()
    hub.add(NAME, files, lfs_from=1 << 40)
    proxy = hub.url.replace("http://", "http://user:secret@")
    run = oscar("pull", NAME, more={"HF_ENDPOINT": "http://hub.invalid", "http_proxy": proxy, "no_proxy": ""})
    check_snapshot(run.stdout.strip(), files)
    for _, _, path, headers in hub.requests:
        assert path.startswith("http://hub.invalid:80/")
        assert headers["Proxy-Authorization"] == "Basic dXNlcjpzZWNyZXQ="
    run = oscar("pull", NAME, ok=False, more={"HF_ENDPOINT": "http://hub.invalid", "http_proxy": "socks5://u:secret@x:1",
                                              "no_proxy": ""})
    assert "is not http://HOST:PORT" in run.stderr and "secret" not in run.stderr


# Commands that take a name.

@pytest.fixture(scope="module")
def demo():
    folder = ROOT / "models/demo"
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    for path in [*folder.glob("model*.safetensors*"), *folder.glob("rotation/*")]:
        files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def test_a_name_is_enough(hub, demo, oscar, cache):
    hub.add("oscar-test/demo", demo)
    # A plan needs no weights.
    plan = json.loads(oscar("serve", "oscar-test/demo", "--dry-run", "--json").stdout)
    assert plan["weight_bytes"] > 1 << 20
    assert not [p for p in hub.paths() if "/model" in p and "/resolve/" in p or "tokenizer" in p]
    info = json.loads(oscar("info", "oscar-test/demo", "--json").stdout)["model"]
    assert info["name"] == "oscar-test/demo" and info["layers"] == 8
    assert "oscar-test/demo" in oscar("info", "oscar-test/demo").stdout
    inspected = json.loads(oscar("inspect", "oscar-test/demo", "--json").stdout)
    assert inspected["num_layers"] == 8 and "weights" not in inspected
    assert oscar("tokenize", "--model", "oscar-test/demo", stdin="Once").stdout.strip()
    assert not [p for p in hub.paths() if "/model" in p and "/resolve/" in p]
    # The rest comes when it is needed; then the hub is not asked again.
    assert "oscar pull oscar-test/demo" in oscar("generate", "oscar-test/demo", "-p", "Once", "--offline", ok=False).stderr
    assert oscar("generate", "oscar-test/demo", "-p", "Once", "-n", 4).stdout
    hub.requests.clear()
    here = oscar("generate", "oscar-test/demo", "-p", "Once", "-n", 4, "--temp", 0).stdout
    assert here == oscar("generate", ROOT / "models/demo", "-p", "Once", "-n", 4, "--temp", 0).stdout
    assert "weights" in json.loads(oscar("inspect", "oscar-test/demo", "--json").stdout)
    assert hub.requests == []
    # A revision that is not here is asked for.
    assert "no revision 'v2'" in oscar("generate", "oscar-test/demo@v2", "-p", "Once", ok=False).stderr


def test_usage_errors_come_before_downloads(hub, demo, oscar):
    hub.add("oscar-test/demo", demo)
    oscar("serve", "oscar-test/demo", "--kv", "bf16", "--sink", 64, ok=False)
    oscar("generate", "oscar-test/demo", "-p", "x", "--template-arguments", "[]", ok=False)
    oscar("eval", "oscar-test/demo", "--kv", "nonsense", "--out", "x", ok=False)
    assert hub.requests == []


def test_the_zoo(hub, oscar, cache, tmp_path):
    folder = ROOT / "tests/data/rotations"
    pair = sorted(folder.rglob("*.pt"))[:2]
    files = {f"Qwen3-8B/seq1_group128/{k}_rotation_x.pt": pair[0].read_bytes() for k in "kv"} if pair else {}
    files |= {"Other/k_a.pt": b"x", "Other/v_a.pt": b"y", "README.md": b"#", "GLM/layer_0.pt": b"z"}
    hub.add("Zhongzhu/OSCAR-RotationZoo", files)
    hub.add("togethercomputer/OSCAR-RotationZoo", files, revision="master")
    out = oscar("zoo", "pull", "Other").stdout.strip()
    assert out == str(repository(cache, "Zhongzhu/OSCAR-RotationZoo") / "snapshots" / ("1" * 40) / "Other")
    assert sorted(os.listdir(out)) == ["k_a.pt", "v_a.pt"]
    assert not [p for p in hub.paths() if "layer_0" in p or "README" in p or "Qwen3" in p]
    assert "there are" in oscar("zoo", "pull", "None", ok=False).stderr
    assert oscar("zoo", "pull", "../..", ok=False).returncode == 2
    # ModelScope, with a token for itself alone.
    hub.requests.clear()
    out = oscar("zoo", "pull", "--from", "modelscope", more={"HF_TOKEN": "hf_secret", "MODELSCOPE_API_TOKEN": "ms"}).stdout.split()
    assert [pathlib.Path(o).name for o in out][-1] == "Other" or "Other" in {pathlib.Path(o).name for o in out}
    assert str(cache.parent / "modelscope") in out[0]
    for _, _, _, headers in hub.requests:
        assert headers["Authorization"] == "Bearer ms"
    for o in out:
        for path in pathlib.Path(o).iterdir():
            blob = path.resolve()
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
