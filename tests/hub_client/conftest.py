"""The fixtures of tests/hub, and an interpreter that has the hub's own package."""
import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "hub"))

from hub_fixtures import cache, env, hub, oscar  # noqa: E402,F401


@pytest.fixture
def client(env):
    """Runs a piece of Python with huggingface_hub and returns what it prints."""
    python = os.environ.get("OSCAR_HUB_PYTHON", sys.executable)
    probe = subprocess.run([python, "-c", "import huggingface_hub"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("huggingface_hub is not installed; OSCAR_HUB_PYTHON names an interpreter that has it")

    def run(code, ok=True, **more):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300,
                              env=env | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | more)
        assert (done.returncode == 0) == ok, done.stderr
        return done.stdout.strip()

    return run
