"""`oscar serve --dry-run` on published configs: every supported family is planned, everything else refused by name."""
import json
import pathlib

import pytest

GIB = 1 << 30

# GPUs of 80 GiB: parameters in billions, those of one token, and how many cards hold weights and one conversation of 32K.
PLANNED = {
    "Qwen--Qwen3-8B_config.json": ("qwen3", 8.19, 8.19, 1),
    "Qwen--Qwen2.5-3B-Instruct_config.json": ("qwen2", 3.09, 3.09, 1),
    "Qwen--Qwen2.5-72B-Instruct_config.json": ("qwen2", 72.7, 72.7, 2),
    "mistralai--Mistral-Nemo-Base-2407_config.json": ("mistral", 12.2, 12.2, 1),
    "meta-llama--Meta-Llama-3.1-70B_config.json": ("llama", 70.6, 70.6, 2),
    "meta-llama--Meta-Llama-3.1-405B_config.json": ("llama", 405.9, 405.9, 16),
    "Qwen--Qwen3-30B-A3B_config.json": ("qwen3_moe", 30.5, 3.35, 1),
    "Qwen--Qwen3-30B-A3B-FP8_config.json": ("qwen3_moe", 30.5, 3.35, 1),
    "Qwen--Qwen3-235B-A22B_config.json": ("qwen3_moe", 235.1, 22.19, 8),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct_config.json": ("qwen3_moe", 480.2, 35.47, 16),
    "zai-org--GLM-4.5-Air_config.RECONSTRUCTED.json": ("glm4_moe", 106.9, 13.42, 4),
    "zai-org--GLM-4.7_config.RECONSTRUCTED.json": ("glm4_moe", 352.8, 33.63, 16),
    "MiniMaxAI--MiniMax-M2.5_config.json": ("minimax_m2", 228.7, 11.03, 4),
    "MiniMaxAI--MiniMax-M2.7_config.json": ("minimax_m2", 228.7, 11.03, 4),
    "Qwen--Qwen3-Next-80B-A3B-Instruct_config.json": ("qwen3_next", 79.67, 3.87, 4),
    "Qwen--Qwen3.5-35B-A3B_config.json": ("qwen3_5_moe", 34.66, 3.45, 1),
    "openai--gpt-oss-20b_config.json": ("gpt_oss", 20.9, 4.19, 1),
    "openai--gpt-oss-120b_config.json": ("gpt_oss", 116.8, 5.71, 1),
}
FAMILIES = {row[0] for row in PLANNED.values()} | {"mistral", "qwen3_5"}
REFUSED = {
    "google--gemma-4-26B-A4B_config.json": ["gemma4", "multimodal"],
    "mistralai--Mistral-7B-Instruct-v0.1_config.json": ["sliding_window", "4096", "--max-model-len 4096"],
}


def plan(oscar, path, *options):
    return oscar.json("serve", "--dry-run", "--json", "--model", path, "--device", "cpu", *options)


@pytest.mark.parametrize("name", PLANNED)
def test_planned(oscar, root, name):
    path = root / "tests/data/model-configs" / name
    family, billions, active, gpus = PLANNED[name]
    made = plan(oscar, path)
    assert made["architecture"] == family
    assert made["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert made["active_parameters"] / 1e9 == pytest.approx(active, rel=0.02)
    share = made["gpus"]
    assert share["count"] == gpus
    assert share["weight_bytes_each"] + share["conversation_bytes_each"] <= 0.9 * 80 * GIB
    shown = oscar("serve", "--dry-run", "--model", path, "--device", "cpu").stdout
    assert "GPUs of 80" in shown, shown
    assert ("this version runs on one GPU" in shown) == (gpus > 1)
    assert "not computed on a GPU" not in shown


@pytest.mark.parametrize("name", REFUSED)
def test_refused(oscar, root, name):
    run = oscar("serve", "--dry-run", "--model", root / "tests/data/model-configs" / name, ok=False)
    assert run.returncode != 0
    for part in REFUSED[name]:
        assert part in run.stderr, run.stderr


def test_gpt_oss_stays_mxfp4_and_windows_hold_little(oscar, root):
    made = plan(oscar, root / "tests/data/model-configs/openai--gpt-oss-20b_config.json")
    # 17 bytes for 32 of the 19.1 billion weights of experts, two for each of the others.
    assert made["weight_bytes"] / 1e9 == pytest.approx(19.11 * 17 / 32 + 1.80 * 2, rel=0.01)
    # Half of the layers keep 64 + 256 to 319 tokens of each conversation, in BF16; so does the BF16 cache it is compared with.
    layer = 2 * 8 * 64 * 2 * made["conversation_tokens"]  # bytes of K and V of one layer in BF16
    assert made["conversation_bytes"] < 0.25 * 12 * layer
    assert made["conversation_bytes_bf16"] == pytest.approx(12 * layer, rel=0.02)


@pytest.mark.parametrize("path", sorted((pathlib.Path(__file__).parents[1] / "data/model-configs").iterdir()), ids=lambda p: p.name)
def test_every_config_is_planned_or_named(oscar, path):
    run = oscar("serve", "--dry-run", "--json", "--model", path, "--device", "cpu", ok=None)
    if run.returncode != 0:
        kind = json.loads(path.read_text())["model_type"]
        assert kind in run.stderr or "sliding_window" in run.stderr, run.stderr
        assert kind not in FAMILIES or "sliding_window" in run.stderr
        return
    made = json.loads(run.stdout)
    # How many cards of 80 GiB, one of which this version runs on, or why none.
    assert (made["gpus"]["count"] is None) == (made["gpus"]["problem"] != "")
    assert made["architecture"] in FAMILIES
    assert made["gpus"]["count"] >= 1 and made["gpus"]["refused"] == ""


def test_fp8_halves_the_weights(oscar, root):
    configs = root / "tests/data/model-configs"
    bf16 = plan(oscar, configs / "Qwen--Qwen3-30B-A3B_config.json")
    fp8 = plan(oscar, configs / "Qwen--Qwen3-30B-A3B-FP8_config.json")
    assert 0.5 < fp8["weight_bytes"] / bf16["weight_bytes"] < 0.6


def test_a_state_counts_whatever_the_length(oscar, root):
    path = root / "tests/data/model-configs/Qwen--Qwen3.5-35B-A3B_config.json"
    made = {tokens: plan(oscar, path, "--plan-tokens", tokens) for tokens in (1024, 131072)}
    for each in made.values():
        assert each["state_bytes"] == 30 * 4 * (32 * 128 * 128 + 3 * 8192)
        assert each["conversation_bytes"] > each["state_bytes"]
    saves = {tokens: each["conversation_bytes_bf16"] / each["conversation_bytes"] for tokens, each in made.items()}
    assert 1.1 < saves[1024] < 1.3 and saves[131072] > 6
    shown = oscar("serve", "--dry-run", "--model", path, "--device", "cpu", "--plan-tokens", 1024).stdout
    assert "recurrent state       62.8 MiB  of it, whatever its length: 88 % here" in shown, shown


def test_a_window_that_is_not_outgrown(oscar, root):
    path = root / "tests/data/model-configs/mistralai--Mistral-7B-Instruct-v0.1_config.json"
    assert plan(oscar, path, "--max-model-len", "4096")["max_context"] == 4096


def test_what_does_not_divide(oscar, root, tmp_path):
    config = json.loads((root / "tests/data/model-configs/Qwen--Qwen2.5-72B-Instruct_config.json").read_text())
    config.update(num_attention_heads=63, num_key_value_heads=7, hidden_size=63 * 128)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    made = plan(oscar, path, "--gpu-memory", "80GiB")
    assert made["gpus"]["count"] is None and "63 heads do not divide" in made["gpus"]["problem"]
    small = plan(oscar, root / "tests/data/model-configs/Qwen--Qwen3-8B_config.json", "--gpu-memory", "12GiB")
    assert small["gpus"]["count"] == 2
