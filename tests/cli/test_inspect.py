import json
import struct

import pytest


def test_model_directory(oscar, root):
    info = oscar.json("inspect", root / "models/demo", "--json")
    assert info["model_type"] == "qwen3"
    assert info["num_layers"] == 8
    assert info["kv_bytes_per_token_bf16"] == 2 * 8 * 2 * 128 * 2
    assert info["weights"]["bytes_by_dtype"].keys() == {"BF16"}
    text = oscar("inspect", root / "models/demo").stdout
    assert "model.embed_tokens.weight" in text and "[8192, 384]" in text


def test_config_alone(oscar, root):
    info = oscar.json("inspect", root / "tests/data/model-configs/Qwen--Qwen3-8B_config.json", "--json")
    assert info["head_dim"] == 128 and "weights" not in info


def test_safetensors(oscar, root):
    info = oscar.json("inspect", root / "tests/data/golden/golden.safetensors", "--json")
    assert info["num_tensors"] == 6
    shapes = {t["name"]: t["shape"] for t in info["tensors"]}
    assert shapes["layer3_k_prerope"] == [150, 2, 128]


def test_usage_errors(oscar):
    for args in (["inspect"], ["inspect", "x", "--no-such-option"], ["no-such-command"], []):
        run = oscar(*args, ok=False)
        assert run.returncode == 2, args


def test_config_file(oscar, root, tmp_path):
    config = tmp_path / "options.toml"
    config.write_text('[tokenize]\njson=true\n')
    assert oscar.json("--config", config, "tokenize", stdin="a")["count"] == 1
    for text in ("jsn=true\n", "[tokenize]\njsn=true\n", "[tokenise]\njson=true\n"):
        config.write_text(text)
        assert oscar("--config", config, "tokenize", stdin="a", ok=False).returncode == 2, text


def test_a_layer_is_asked_of_rotations_alone(oscar, root):
    for path in ("models/demo", "models/demo/config.json", "tests/data/golden/golden.safetensors"):
        assert "--layer chooses a layer of a rotation" in oscar("inspect", root / path, "--layer", 0, ok=False).stderr


def test_names_in_files_cannot_drive_a_terminal(oscar, tmp_path):
    name = "\x1b[31mred\u202e"
    write_safetensors(tmp_path / "x.safetensors", {name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x")
    shown = oscar("inspect", tmp_path / "x.safetensors").stdout
    assert "\x1b" not in shown and "\\x1b[31mred" in shown
    assert oscar.json("inspect", tmp_path / "x.safetensors", "--json")["tensors"][0]["name"] == name


def test_rotations(oscar, root, tmp_path):
    rotation = tmp_path / "rotation"
    oscar("rotation", "compose", "--objective", "hadamard", "--layers", "0-1", "--head-dim", 32, "--out", rotation)
    assert "--json" in oscar("inspect", rotation, "--layer", 1, "--json", ok=False).stderr
    file = rotation / "rotation.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header["__metadata__"]["k_objective"] = "\x1b[31mred"
    header["__metadata__"]["composition"] = "\x1b[0m"
    write_safetensors(file, header, data[8 + size:])
    shown = oscar("inspect", rotation).stdout
    assert "\x1b" not in shown and "\\x1b[31mred" in shown


def write_safetensors(path, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "name, header, data, expected",
    [
        ("range", {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"x" * 8, "a"),
        ("shape", {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}, b"x" * 16, "a"),
        ("dtype", {"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, b"x" * 16, "F99"),
        ("json", b'{"a": ', b"", "JSON"),
        ("huge", {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, b"x" * 16, "a"),
    ],
)
def test_hostile_safetensors(oscar, tmp_path, name, header, data, expected):
    path = tmp_path / f"{name}.safetensors"
    write_safetensors(path, header, data)
    run = oscar("inspect", path, ok=False)
    assert run.returncode == 1
    assert str(path) in run.stderr and expected in run.stderr


def test_missing_and_unknown_files(oscar, tmp_path):
    assert "no such file" in oscar("inspect", tmp_path / "none.pt", ok=False).stderr
    (tmp_path / "x.bin").write_bytes(b"123")
    assert ".safetensors" in oscar("inspect", tmp_path / "x.bin", ok=False).stderr
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
    assert "cut.pt" in oscar("inspect", tmp_path / "cut.pt", ok=False).stderr


def test_one_file_of_a_pair_is_shown_alone(oscar, root, tmp_path):
    pair = root / "tests/data/rotations/qwen3-4b-thinking-2507-2-layers"
    keys = pair / "k_rotation_qqt_r_h_pbr.pt"
    beside = oscar.json("inspect", keys, "--json")
    assert beside["objective"] == "qqt_r_h_pbr" and list(beside["layers"]) == ["0", "1"]
    # The same whatever its name and neighbours.
    (tmp_path / "one.pt").write_bytes(keys.read_bytes())
    assert oscar.json("inspect", tmp_path / "one.pt", "--json") == beside
    values = oscar.json("inspect", pair / "v_rotation_sst_r_h_pbr.pt", "--json")
    assert values["objective"] == "sst_r_h_pbr"
    assert "name its directory" in oscar("inspect", keys, "--layer", 0, ok=False).stderr
    assert "rotation: 2 layers" in oscar("inspect", pair).stdout


def test_keys_of_a_prompt(oscar, root, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The sea was calm and the boats came home late. " * 20)
    out = tmp_path / "keys"
    command = ("inspect", root / "models/demo", "--kv", "oscar-su", "--prompt", prompt)
    shown = oscar(*command, "--out", out).stdout
    assert "as computed" in shown and "divided by token norms" in shown
    made = json.loads((out / "keys.json").read_text())
    assert [stage["stage"] for stage in made["stages"]] == ["as computed", "rotated", "divided by token norms"]
    head = made["stages"][0]["heads"][0]
    assert len(head["token_norms"]) == made["tokens"] and len(head["channel_rms"]) == 128
    for name in ("channels", "norms", "spectrum", "tokens", "map-as-computed", "map-rotated", "map-divided-by-token-norms"):
        text = (out / f"keys-{name}.svg").read_text()
        assert text.startswith("<svg") and "NaN" not in text and len(text) < 100_000, name
    assert "<svg" in (out / "keys.html").read_text()
    assert oscar.json(*command, "--json") == made
    # Norms that are left alone are not there.
    assert "token norms" not in oscar("inspect", root / "models/demo", "--kv", "oscar+", "--prompt", prompt).stdout.replace("norms, most", "")
    for option in (("--kv", "oscar+"), ("--rotation", "x"), ("--head", 0), ("--out", "x")):
        assert option[0] in oscar("inspect", root / "models/demo", *option, ok=False).stderr
    # Variables of other commands change nothing.
    config = root / "models/demo/config.json"
    assert oscar("inspect", config, env={"OSCAR_KV": "oscar+", "OSCAR_ROTATION": "x"}).stdout == oscar("inspect", config).stdout
    assert "--layer 99" in oscar(*command, "--layer", 99, ok=False).stderr
    assert "--bits" in oscar(*command, "--bits", 2.5, ok=False).stderr
    prompt.write_text("Short.")
    assert "the prompt has" in oscar(*command, ok=False).stderr
