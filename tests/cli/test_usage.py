"""What a newcomer types, and what the program makes of it."""
import json
import os

import pytest


def test_the_model_is_an_argument(oscar, root):
    named = oscar.json("generate", root / "models/demo", "-p", "Once", "-n", 4, "--json")
    assert len(named["token_ids"]) == 4
    assert named["token_ids"] == oscar.json("generate", "--model", root / "models/demo", "--prompt", "Once",
                                            "--max-tokens", 4, "--json")["token_ids"]


def test_a_hub_name_finds_the_local_cache(oscar, root, tmp_path):
    env = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    missing = oscar("generate", "oscar-test/demo", "-p", "Once", ok=False, env=env)
    assert "oscar pull oscar-test/demo" in missing.stderr
    repository = tmp_path / "models--oscar-test--demo"
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    (repository / "refs/main").write_text("abc123")
    os.symlink(root / "models/demo", repository / "snapshots/abc123")
    assert oscar("generate", "oscar-test/demo", "-p", "Once", "-n", 4, env=env).stdout
    assert oscar.json("inspect", "oscar-test/demo", "--json", env=env)["num_layers"] == 8
    assert oscar("serve", "oscar-test/demo", "--dry-run", env=env).stdout


@pytest.mark.parametrize("files,expected", [
    ({"model.gguf": "GGUF"}, "GGUF"),
    ({"adapter_config.json": '{"base_model_name_or_path": "a/b"}'}, 'an adapter, not a model; merge it into "a/b"'),
    ({"config.json": '{"model_type": "x", "text_config": {}}'}, "is multimodal"),
])
def test_what_is_not_a_model_is_named(oscar, tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert expected in oscar("chat", tmp_path, stdin="", ok=False).stderr


def test_unknown_words_are_answered_with_the_nearest(oscar):
    run = oscar("srve", ok=False)
    assert run.returncode == 2 and run.stderr == "oscar: unknown command: srve; did you mean serve?\n"
    run = oscar("serve", "--prot", 1, "--tensor-parallel-size", 2, ok=False)
    assert run.returncode == 2
    assert run.stderr.index("did you mean --port?") < run.stderr.index("one process runs on one device")
    assert "--device cuda" in oscar("chat", "-ngl", 99, ok=False).stderr


def test_help(oscar):
    assert oscar("help", "serve").stdout == oscar("serve", "--help").stdout
    assert "serve" in oscar("help").stdout
    assert "did you mean serve?" in oscar("help", "serv", ok=False).stderr


@pytest.mark.parametrize("args,expected", [
    (["--chat-template", "/no/such.jinja"], "/no/such.jinja"),
    (["/no/such/model"], "/no/such/model"),
    (["--kv", "nonsense"], "nonsense"),
])
def test_nothing_listens_before_options_are_checked(oscar, args, expected):
    run = oscar("serve", "--port", 0, *args, ok=False)
    assert expected in run.stderr and "listening" not in run.stderr


# 2 KV heads of 128 in the demo model: a norm per token over all heads is 32 / 256 bits of K.
@pytest.mark.parametrize("kv,history", [
    ("quarot", 2.25), ("naive-sym", 2.25), ("lloyd-max", 2.25), ("kivi", 3.0), ("kivi-sink", 2.25), ("kitty", 2.40625),
    ("turboquant", 3.1875), ("oscar-su", None), ("oscar-su:norm=none", 3.0), ("oscar-su:bits=4:norm=none:group=128", 4.25),
])
def test_the_plan_of_every_method_counts_what_its_pages_hold(oscar, kv, history):
    plan = oscar.json("serve", "--dry-run", "--json", "--kv", kv, "--kv-memory", "300MiB")
    sealed = 16 * plan["sealed_page_bytes"] / plan["open_page_bytes"]
    if history is None:
        assert 3.0 < sealed < 3.2
    else:
        assert sealed == history
    tokens, open_row = plan["conversation_tokens"], plan["open_page_bytes"] / 64
    assert plan["bits_per_element"] == pytest.approx(16 * plan["conversation_bytes"] / (tokens * open_row))
    assert sealed <= plan["bits_per_element"] < sealed + 1
    assert plan["conversation_bytes"] < plan["conversation_bytes_bf16"] / 3


def test_a_short_answer_has_no_two_bit_pages_yet(oscar, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": "Sort these numbers: 3 1 2"}]))
    run = oscar("generate", "--messages", tmp_path / "m.json", "--stats")
    assert "no 2-bit pages yet" in run.stderr
    told = oscar.json("generate", "--messages", tmp_path / "m.json", "--json")
    assert told["cache"]["quantized_tokens"] == 0
