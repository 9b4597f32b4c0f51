"""One prompt through every door: `oscar generate`, `oscar chat`, the server, LanguageModel and Engine.

All of them must give the same ids, the same text and reasoning, and stop for the same reason.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/server"))
from conftest import BINARY, Server  # noqa: E402

LIBRARY_DOOR = os.environ.get("OSCAR_LIBRARY_DOOR", str(ROOT / "build/release/tests/library_door"))
DEMO = ROOT / "models/demo"
SUM = "Add these numbers: 170 710 302 122 813"  # the model thinks first
SORT = "Sort these numbers: 599 972 169 139 702 205"  # and here it does not
GENERATION = json.loads((DEMO / "generation_config.json").read_text())


def copy_of_demo(folder, **generation):
    """The demo model with another generation_config.json; None takes a field out."""
    folder.mkdir()
    for path in DEMO.iterdir():
        if path.name != "generation_config.json":
            (folder / path.name).symlink_to(path)
    merged = {**GENERATION, **generation}
    (folder / "generation_config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> (model directory, its server)."""
    base = tmp_path_factory.mktemp("models")
    folders = {
        "demo": DEMO,
        "short": copy_of_demo(base / "short", max_new_tokens=7),
        # Says nothing about sampling: temperature 1.
        "silent": copy_of_demo(base / "silent", do_sample=None, temperature=None, top_p=None),
        # Says how, but not whether.
        "warm": copy_of_demo(base / "warm", do_sample=None, temperature=0.7, top_p=None, top_k=20),
    }
    servers = {}
    yield {name: (folder, servers.setdefault(name, Server("--no-prefix-cache", model=folder).ready()))
           for name, folder in folders.items()}
    for server in servers.values():
        server.stop()
    shutil.rmtree(base)


def run(*args, stdin=None):
    result = subprocess.run([str(arg) for arg in args], input=stdin, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def flags(case):
    out = []
    for name, flag in (("temperature", "--temperature"), ("seed", "--seed"), ("max_tokens", "--max-tokens")):
        if name in case:
            out += [flag, case[name]]
    for text in case.get("stop", []):
        out += ["--stop", text]
    for token in case.get("stop_token_ids", []):
        out += ["--stop-token-id", token]
    return out


def by_generate(folder, case, tmp_path):
    if "prompt" in case:
        given = ["--prompt", case["prompt"]]
    else:
        (tmp_path / "messages.json").write_text(json.dumps(case["messages"]))
        given = ["--messages", tmp_path / "messages.json"]
    told = json.loads(run(BINARY, "generate", "--model", folder, "--json", *given, *flags(case)))
    return {"content": told["text"], "reasoning": told.get("reasoning", ""), "ids": told["token_ids"],
            "finish_reason": told["finish_reason"], "stop_reason": told["stop_reason"]}


def by_chat(folder, case, tmp_path):
    (message,) = case["messages"]
    saved = tmp_path / "saved.json"
    run(BINARY, "chat", "--model", folder, *flags(case), stdin=f"{message['content']}\n/save {saved}\n/exit\n")
    told = json.loads(saved.read_text())
    (answer,) = told["answers"]
    reply = told["messages"][-1]
    return {"content": reply["content"], "reasoning": reply.get("reasoning_content", ""), "ids": answer["token_ids"],
            "finish_reason": answer["finish_reason"], "stop_reason": answer["stop_reason"]}


def by_server(server, case):
    path = "/v1/completions" if "prompt" in case else "/v1/chat/completions"
    body = {key: value for key, value in case.items() if key != "model"}
    reply = server.post(path, {**body, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    message = choice.get("message") or {"content": choice["text"]}
    return {"content": message["content"] or "", "reasoning": message.get("reasoning_content") or "",
            "ids": choice["token_ids"], "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


CASES = {
    "greedy, reasoning": chat(SUM),
    "greedy, no reasoning": chat(SORT),
    "seeded": chat(SORT, temperature=1.5, seed=11, max_tokens=40),
    "seeded, reasoning": chat(SUM, temperature=0.8, seed=3),
    "stop string": chat(SORT, stop=["205 5"]),
    "stop string in the reasoning": chat(SUM, stop=["1182\n", "never"]),
    "stop string after the reasoning": chat(SUM, stop=["\n2117"]),
    "stop token": chat(SORT, stop_token_ids=[None]),  # the third of the greedy answer
    "max tokens": chat(SORT, max_tokens=5),
    "reasoning cut by max tokens": chat(SUM, max_tokens=20),
    "max tokens of the model": {"model": "short", **chat(SUM)},
    "more than the model's max tokens": {"model": "short", **chat(SORT, max_tokens=40)},
    "no word on sampling": {"model": "silent", **chat("Tell me a story", seed=5, max_tokens=40)},
    "sampling without do_sample": {"model": "warm", **chat("Tell me a story", seed=5, max_tokens=40)},
    "raw text": {"prompt": "<|im_start|>user\n" + SUM + "<|im_end|>\n<|im_start|>assistant\n", "max_tokens": 300},
}


@pytest.mark.parametrize("name", CASES)
def test_every_door_gives_the_same(models, name, tmp_path):
    case = dict(CASES[name])
    folder, server = models[case.pop("model", "demo")]
    if case.get("stop_token_ids") == [None]:
        case["stop_token_ids"] = [by_generate(folder, chat(SORT), tmp_path)["ids"][2]]
    doors = json.loads(run(LIBRARY_DOOR, stdin=json.dumps({"model": str(folder), **case})))
    doors["generate"] = by_generate(folder, case, tmp_path)
    if "messages" in case:
        doors["chat"] = by_chat(folder, case, tmp_path)
    doors["server"] = by_server(server, case)
    first = doors["generate"]
    for door, told in doors.items():
        assert told == first, door
    # And it is what the case is about.
    if name.startswith("greedy"):
        assert first["finish_reason"] == "stop" and first["stop_reason"] is None
        assert first["content"] == ("2117" if "messages" in case and SUM in str(case) else "139 169 205 599 702 972")
        assert bool(first["reasoning"]) == (SUM in str(case))
    elif name.startswith("stop string"):
        assert first["finish_reason"] == "stop" and first["stop_reason"] in case["stop"]
        assert first["stop_reason"] not in first["content"] + first["reasoning"]
        assert first["content"] == ("139 169 " if name == "stop string" else "")
        assert ("= 2117" in first["reasoning"]) == (name == "stop string after the reasoning")
    elif name == "stop token":
        assert len(first["ids"]) == 3 and first["stop_reason"] == first["ids"][-1]
    elif name == "raw text":
        assert "<think>" in first["content"] and not first["reasoning"]
    elif name == "max tokens of the model":
        assert len(first["ids"]) == 7 and first["finish_reason"] == "length"
    elif name == "more than the model's max tokens":
        assert first["content"] == "139 169 205 599 702 972"
    elif "max tokens" in name:
        assert first["finish_reason"] == "length" and len(first["ids"]) == case["max_tokens"]
        assert bool(first["reasoning"]) == ("reasoning" in name) and bool(first["content"]) != ("reasoning" in name)
    elif "sampl" in name:  # or it would prove nothing about sampling
        assert first["ids"] != by_generate(folder, {**case, "temperature": 0}, tmp_path)["ids"]


def test_the_servers_page_is_told_what_to_suggest(models):
    _, server = models["demo"]
    props = server.get("/props").json()
    assert len(props["sample_prompts"]) == 3
    assert props["default_generation_settings"]["max_tokens"] == 1024


def test_the_model_can_answer_what_it_suggests(models, tmp_path):
    answers = {"Add": lambda text: str(sum(map(int, text.split()))),
               "Sort": lambda text: " ".join(sorted(text.split())), "Repeat": str}
    for prompt in json.loads((DEMO / "sample_prompts.json").read_text()):
        task, _, rest = prompt.partition(": ")
        told = by_generate(DEMO, chat(prompt), tmp_path)
        assert told["content"] == answers[task.split()[0]](rest), prompt
