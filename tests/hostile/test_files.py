"""Files that are not what they are named, or change while they are read."""
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from conftest import BINARY, DEMO  # noqa: E402


def run(*args, stdin=""):
    return subprocess.run([BINARY, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=20)


def test_config_files_are_regular_and_bounded(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    large = tmp_path / "large.toml"
    large.write_text("# x\n" * 100_000)
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    for path, why in (("/dev/zero", "not a regular file"), (pipe, "not a regular file"), (tmp_path, "not a regular file"),
                      (large, "more than the limit"), (tmp_path / "none", "No such file"), (tmp_path / "nowhere", "which is not there")):
        ended = run("info", "--config", path)
        assert ended.returncode == 2, (path, ended)
        assert str(path) in ended.stderr and why in ended.stderr, ended.stderr
    good = tmp_path / "good.toml"
    good.write_text('log-level = "error"\n[serve]\nport = 0\n')
    assert run("info", "--config", good).returncode == 0
    good.write_text("no-such-option = 1\n")
    assert run("info", "--config", good).returncode == 2


@pytest.fixture
def model(tmp_path):
    """The demo model under names of our own; what a test breaks is its copy."""
    copy = tmp_path / "model"
    shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("eval", "rotation"))
    return copy


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja", "model.safetensors"])
def test_a_broken_link_is_not_an_absent_file(model, name):
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../blobs/0123abcd")
    ended = run("chat", "--model", model, "--max-tokens", 1, stdin="x\n")
    assert ended.returncode == 1, ended
    assert f"{model / name}: a link to ../blobs/0123abcd, which is not there" in ended.stderr


def test_weights_that_shrink_while_they_are_loaded(model):
    """Each run ends with an answer or with an error that names the file, never by a signal."""
    shards = sorted(model.glob("*.safetensors"))
    whole = {shard: shard.read_bytes() for shard in shards}
    refused = 0
    chance = random.Random(1)
    for _ in range(20):
        for shard, data in whole.items():
            shard.write_bytes(data)
        process = subprocess.Popen([BINARY, "generate", "--model", str(model), "--prompt", "x", "--max-tokens", "1"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(chance.uniform(0, 0.1))
        shard = chance.choice(shards)
        os.truncate(shard, chance.choice([0, 4096, len(whole[shard]) // 2]))
        errors = process.communicate(timeout=60)[1]
        assert process.returncode in (0, 1), (process.returncode, errors)
        if process.returncode == 1:
            refused += 1
            assert str(shard) in errors, errors
    assert refused > 3
