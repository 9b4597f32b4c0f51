"""Commands and the server on a model with a recurrent state: a random multimodal checkpoint of Qwen3.5-MoE's shape, its text part
nested, its experts fused, with the demo model's tokenizer."""
import json
import random
import shutil
import struct
import subprocess

import pytest
from conftest import BINARY, DEMO, Server
from test_families import HIGH, answers, ask, run

H, WIDTH, EXPERTS, HEADS, DIM, KEYS, VALUES, DK, DV = 64, 40, 4, 2, 128, 2, 4, 16, 32
TEXT = {
    "model_type": "qwen3_5_moe_text", "hidden_size": H, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH,
    "num_hidden_layers": 4, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": DIM, "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "vocab_size": 8192, "max_position_embeddings": 32768, "hidden_act": "silu",
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 4, "linear_num_key_heads": KEYS,
    "linear_num_value_heads": VALUES, "linear_key_head_dim": DK, "linear_value_head_dim": DV, "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [6, 5, 5]},
}
CONFIG = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": TEXT,
          "vision_config": {}, "tie_word_embeddings": False, "eos_token_id": 0}


def shapes():
    channels = 2 * KEYS * DK + VALUES * DV
    yield "model.language_model.embed_tokens.weight", (8192, H)
    yield "lm_head.weight", (8192, H)
    yield "model.language_model.norm.weight", (H,)
    yield "model.visual.patch_embed.proj.weight", (8, 8)
    yield "mtp.fc.weight", (8, 8)
    for i, kind in enumerate(TEXT["layer_types"]):
        layer = f"model.language_model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", (H,)
        if kind == "linear_attention":
            mixer = layer + "linear_attn."
            yield mixer + "in_proj_qkv.weight", (channels, H)
            yield mixer + "in_proj_z.weight", (VALUES * DV, H)
            yield mixer + "in_proj_a.weight", (VALUES, H)
            yield mixer + "in_proj_b.weight", (VALUES, H)
            yield mixer + "conv1d.weight", (channels, 1, 4)
            yield mixer + "A_log", (VALUES,)
            yield mixer + "dt_bias", (VALUES,)
            yield mixer + "norm.weight", (DV,)
            yield mixer + "out_proj.weight", (H, VALUES * DV)
        else:
            mixer = layer + "self_attn."
            yield mixer + "q_proj.weight", (2 * HEADS * DIM, H)
            yield mixer + "k_proj.weight", (DIM, H)
            yield mixer + "v_proj.weight", (DIM, H)
            yield mixer + "o_proj.weight", (H, HEADS * DIM)
            yield mixer + "q_norm.weight", (DIM,)
            yield mixer + "k_norm.weight", (DIM,)
        yield layer + "mlp.gate.weight", (EXPERTS, H)
        yield layer + "mlp.experts.gate_up_proj", (EXPERTS, 2 * WIDTH, H)
        yield layer + "mlp.experts.down_proj", (EXPERTS, H, WIDTH)
        yield layer + "mlp.shared_expert.gate_proj.weight", (WIDTH, H)
        yield layer + "mlp.shared_expert.up_proj.weight", (WIDTH, H)
        yield layer + "mlp.shared_expert.down_proj.weight", (H, WIDTH)
        yield layer + "mlp.shared_expert_gate.weight", (1, H)


def write(folder, skip=()):
    rng = random.Random(29)
    header, data, at = {}, [], 0
    for name, shape in shapes():
        count = 1
        for extent in shape:
            count *= extent
        block = bytearray(rng.randbytes(2 * count))
        block[1::2] = bytes(block[1::2]).translate(HIGH)
        if name in skip:
            continue
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(block)]}
        data.append(bytes(block))
        at += len(block)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hybrid"))


def test_generate_says_what_it_does_not_read(model):
    ask_once = ["generate", "--model", model, "--prompt", "One two three", "--max-tokens", 12, "--temperature", 0, "--kv-memory",
                "64MiB", "--device", "cpu"]
    done = subprocess.run([BINARY, *map(str, ask_once)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "1 tensors of vision or audio and 1 of multi-token prediction are not read" in done.stderr
    assert run(*ask_once, "--threads", 1) == done.stdout
    for options in (["--portable"], ["--kv", "oscar+"], ["--kv", "kivi"], ["--weights", "fp8"], ["--chunk", 3]):
        assert run(*ask_once, *options)


def test_a_missing_state_tensor_is_named(tmp_path):
    broken = write(tmp_path, skip=("model.language_model.layers.2.linear_attn.A_log",))
    done = subprocess.run([BINARY, "generate", "--model", broken, "--prompt", "x", "--device", "cpu"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode != 0 and "model.language_model.layers.2.linear_attn.A_log" in done.stderr


def test_calibrate_and_use(model, tmp_path):
    """Rotations and sensitivities are those of layers 1 and 3."""
    run("calibrate", "--model", model, "--tokens", 1200, "--out", tmp_path / "rotation", "--kv-memory", "64MiB", "--device", "cpu")
    for method in ("oscar", "oscar+"):
        run("generate", "--model", model, "--rotation", tmp_path / "rotation", "--kv", method, "--prompt", "One", "--max-tokens", 4,
            "--kv-memory", "64MiB", "--device", "cpu")
    done = subprocess.run([BINARY, "generate", "--model", str(model), "--rotation", str(tmp_path / "rotation"), "--kv", "oscar+",
                           "--bits", "2.75", "--prompt", "One", "--max-tokens", "2", "--kv-memory", "64MiB", "--device", "cpu"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_eval(model, tmp_path):
    run("eval", "--model", model, "--kv", "bf16,oscar+", "--suite", DEMO / "eval", "--tasks", "recall_4k", "--limit", 1, "--text", "none",
        "--out", tmp_path / "eval", "--kv-memory", "64MiB", "--device", "cpu")


def test_plan_counts_the_state(model):
    state = 2 * 4 * (VALUES * DK * DV + 3 * (2 * KEYS * DK + VALUES * DV))
    made = json.loads(run("serve", "--dry-run", "--json", "--model", model, "--device", "cpu", "--plan-tokens", 4096))
    assert made["state_bytes"] == state
    shown = run("serve", "--dry-run", "--model", model, "--device", "cpu", "--plan-tokens", 4096)
    assert "recurrent state" in shown


def test_server_prefix_cache(model):
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    for options in (["--deterministic"], []):
        texts, cached = answers(model, prompt, 3, *options)
        assert len(set(texts)) == 1 or not options, texts
        assert cached[0] == 0 and min(cached[1:]) > 0, cached
    texts, cached = answers(model, prompt, 2, "--state-snapshots", "0")
    assert cached == [0, 0]


def test_server_shows_states_and_continues(model, tmp_path):
    server = Server("--prefix-dir", tmp_path / "prefixes", model=model).ready()
    try:
        assert any("recurrent states" in line and "not used" in line for line in server.lines)
        prompt = "The quick brown fox jumps over the lazy dog. " * 60
        first = ask(server, prompt)
        longer = prompt + first["choices"][0]["text"] + " And then?"
        second = ask(server, longer)
        # At most the tokens that join prompt and answer are read again.
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 64
        with server.client() as client:
            shown = client.get("/v1/oscar/cache").json()
        each = 2 * 4 * (VALUES * DK * DV + 3 * (2 * KEYS * DK + VALUES * DV))
        assert shown["snapshot_bytes"] >= 2 * each and shown["snapshot_bytes"] % each == 0
        assert shown["state_bytes"] == 0
        assert any(sequence["state_bytes"] > 0 for sequence in shown["sequences"])
    finally:
        server.stop()
