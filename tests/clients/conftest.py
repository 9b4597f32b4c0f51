"""The official clients of both APIs against two servers: one whose model follows a script, and the demo model.

They are not Debian packages: pip install openai anthropic, and name that interpreter with OSCAR_CLIENTS_PYTHON when the build is
configured. Without them every test is skipped and says so.
"""
import importlib.util
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTED = os.environ.get("OSCAR_SCRIPTED_SERVER", str(ROOT / "build/release/tests/scripted_server"))

spec = importlib.util.spec_from_file_location("server_conftest", ROOT / "tests/server/conftest.py")
server_conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(server_conftest)


class Scripted:
    name = "scripted"

    def __init__(self):
        template = ROOT / "tests/data/text/templates/Qwen-Qwen3-0.6B.jinja"
        self.process = subprocess.Popen([SCRIPTED, str(ROOT / "models/demo"), str(template)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def stop(self):
        self.process.stdin.close()
        return self.process.wait(20)


@pytest.fixture(scope="session")
def scripted():
    running = Scripted()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def demo():
    running = server_conftest.Server("--max-model-len", 4096, "--api-key", "secret-key", "--tool-parser", "hermes").ready()
    running.name = "demo"
    yield running
    assert running.stop() == 0, running.lines[-5:]


@pytest.fixture(scope="session")
def demanding(demo):
    """The demo model, where it can be made to call a tool."""
    props = demo.get("/props", headers={"Authorization": "Bearer secret-key"}).json()
    if not props["structured_output"]["available"]:
        pytest.skip("built without xgrammar")
    return demo
