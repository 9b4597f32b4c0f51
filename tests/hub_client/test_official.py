"""The same cache as the hub's own Python client: each finds what the other downloaded."""
import os
import pathlib
import subprocess
import sys

from test_hub import NAME, WANTED, check_snapshot, repository, sharded

PATTERNS = sorted(WANTED)


def layout(root):
    """Every path below, with what links point to and what files hold."""
    out = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            out[name] = os.readlink(path)
        elif path.is_file():
            out[name] = path.read_bytes()
    return out


def test_the_same_layout(hub, oscar, client, cache, tmp_path):
    files = sharded()
    hub.add(NAME, files)
    ours = oscar("pull", NAME).stdout.strip()
    other = tmp_path / "other"
    theirs = client(f"from huggingface_hub import snapshot_download as d; print(d({NAME!r}, allow_patterns={PATTERNS}))",
                    HF_HUB_CACHE=str(other))
    assert pathlib.Path(ours).relative_to(cache) == pathlib.Path(theirs).relative_to(other)
    mine, its = layout(repository(cache)), layout(repository(other))
    extra = {name for name in its if name.startswith("trees/")}  # a listing that it keeps for itself
    assert mine == {name: value for name, value in its.items() if name not in extra}
    # And the locks have the same names.
    assert {p.name for p in (cache / ".locks").rglob("*.lock")} == {p.name for p in (other / ".locks").rglob("*.lock")}


def test_it_finds_what_we_pulled(hub, oscar, client):
    files = sharded()
    hub.add(NAME, files)
    ours = oscar("pull", NAME).stdout.strip()
    hub.requests.clear()
    offline = {"HF_HUB_OFFLINE": "1"}
    assert client(f"from huggingface_hub import snapshot_download as d; print(d({NAME!r}))", **offline) == ours
    one = client(f"from huggingface_hub import hf_hub_download as d; print(d({NAME!r}, 'rotation/sensitivity.json'))",
                 **offline)
    assert one == ours + "/rotation/sensitivity.json"
    assert client(f"from huggingface_hub import scan_cache_dir as s; i = s(); print(len(i.repos), len(i.warnings))",
                  **offline) == "1 0"
    assert hub.requests == []
    # Online it downloads nothing again.
    client(f"from huggingface_hub import snapshot_download as d; print(d({NAME!r}, allow_patterns={PATTERNS}))")
    assert hub.paths("cdn") == []


def test_we_find_what_it_pulled(hub, oscar, client):
    files = sharded()
    hub.add(NAME, files)
    theirs = client(f"from huggingface_hub import snapshot_download as d; print(d({NAME!r}, allow_patterns={PATTERNS}))")
    hub.requests.clear()
    assert oscar("pull", NAME, "--offline").stdout.strip() == theirs
    assert hub.requests == []
    assert oscar("pull", NAME).stdout.strip() == theirs
    assert len(hub.requests) == 1, "the listing alone"
    check_snapshot(theirs, files)


def test_we_finish_what_it_began(hub, oscar, client):
    files = sharded()
    hub.add(NAME, files)
    client(f"from huggingface_hub import hf_hub_download as d; print(d({NAME!r}, 'config.json'))")
    assert "lacks" in oscar("pull", NAME, "--offline", ok=False).stderr
    check_snapshot(oscar("pull", NAME).stdout.strip(), files)


def test_its_lock_is_ours(hub, oscar, client, cache):
    """While its file lock on a blob is held, we wait."""
    files = sharded()
    hub.add(NAME, files)
    digest = hub.repositories[NAME]["main"].digest("model-00001-of-00002.safetensors")
    lock = cache / ".locks" / repository(cache).name / f"{digest}.lock"
    lock.parent.mkdir(parents=True)
    waited = False
    code = (f"import sys\nfrom huggingface_hub.utils import WeakFileLock\n"
            f"with WeakFileLock({str(lock)!r}):\n print('held', flush=True)\n sys.stdin.read()")
    python = os.environ.get("OSCAR_HUB_PYTHON", sys.executable)
    client("print(1)")  # skips where the package is absent
    holder = subprocess.Popen([python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline().strip() == "held"
    process = oscar.start("pull", NAME)
    for line in process.stderr:
        if "another process is downloading it" in line:
            waited = True
            holder.stdin.close()
    assert waited and process.wait(60) == 0
    holder.wait(60)
