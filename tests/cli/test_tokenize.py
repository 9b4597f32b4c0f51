import pytest


@pytest.fixture
def demo(root):
    return root / "models/demo"


def test_round_trip(oscar, demo):
    text = "Numbers 12345, na\u00efve caf\u00e9 \u2014 \u4f60\u597d \U0001f600\n\ttabs\n"
    ids = oscar("tokenize", "--model", demo, stdin=text).stdout
    assert all(word.isdigit() for word in ids.split())
    assert oscar("tokenize", "--model", demo, "--decode", stdin=ids).stdout == text
    as_list = "[" + ", ".join(ids.split()) + "]"
    assert oscar("tokenize", "--model", demo / "tokenizer.json", "--decode", stdin=as_list).stdout == text


def test_json(oscar, demo):
    text = "caf\u00e9 \U0001f600"
    out = oscar.json("tokenize", "--model", demo, "--json", stdin=text)
    assert out["count"] == len(out["tokens"]) and out["bytes"] == len(text.encode())
    assert out["vocab_size"] == 8192
    assert bytes(b for token in out["tokens"] for b in token["bytes"]).decode() == text
    ids = " ".join(str(token["id"]) for token in out["tokens"])
    back = oscar.json("tokenize", "--model", demo, "--decode", "--json", stdin=ids)
    assert back == {"count": out["count"], "text": text}


def test_special_tokens_are_text_unless_asked_for(oscar, demo):
    plain = oscar.json("tokenize", "--model", demo, "--json", stdin="<|im_end|>")
    assert plain["count"] > 1 and not any(token["special"] for token in plain["tokens"])
    parsed = oscar.json("tokenize", "--model", demo, "--json", "--parse-special", stdin="<|im_end|>")
    assert [(token["id"], token["special"]) for token in parsed["tokens"]] == [(2, True)]
    assert oscar("tokenize", "--model", demo, "--decode", stdin="2").stdout == ""
    assert oscar("tokenize", "--model", demo, "--decode", "--parse-special", stdin="2").stdout == "<|im_end|>"


@pytest.mark.parametrize("stdin, message", [("12 x", "not a token id"), ("8192", "no token 8192"), ("-1", "no token -1")])
def test_bad_ids(oscar, demo, stdin, message):
    assert message in oscar("tokenize", "--model", demo, "--decode", stdin=stdin, ok=False).stderr


def test_errors(oscar, demo, tmp_path):
    assert "byte 1" in oscar("tokenize", "--model", demo, stdin=b"a\xff", ok=False).stderr.decode()
    assert "tokenizer.json" in oscar("tokenize", "--model", tmp_path, stdin="", ok=False).stderr


def test_the_demo_model_is_the_default(oscar, demo):
    assert oscar("tokenize", stdin="na\u00efve").stdout == oscar("tokenize", "--model", demo, stdin="na\u00efve").stdout
