"""A fake hub, an empty cache, and the real binary between them."""
import os
import pathlib
import subprocess

import pytest

from fake_hub import Hub

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("OSCAR_BIN", str(ROOT / "build/release/oscar"))
# Of the machine that the tests run on, which is none of theirs.
FOREIGN = ("HF_", "HUGGING", "TRANSFORMERS_", "XDG_", "MODELSCOPE_", "http_proxy", "https_proxy", "all_proxy",
           "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def env(hub, tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    return clean | {"HF_ENDPOINT": hub.url, "MODELSCOPE_ENDPOINT": hub.url, "HOME": str(tmp_path / "home"),
                    "HF_HUB_CACHE": str(tmp_path / "cache"), "no_proxy": "127.0.0.1",
                    "OSCAR_HUB_FIRST_PAUSE": "0.01"}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def oscar(env):
    def run(*args, ok=True, more=None, stdin=""):
        done = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, input=stdin,
                              env=env | (more or {}), timeout=300)
        assert (done.returncode == 0) == ok, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        if not ok:
            assert done.stdout == ""
        return done

    run.start = lambda *args: subprocess.Popen([BINARY, *map(str, args)], env=env, text=True,
                                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return run
