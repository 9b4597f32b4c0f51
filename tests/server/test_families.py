"""Commands and the server on mixtures of experts: random checkpoints of GLM's family and of gpt-oss with the demo model's tokenizer."""
import json
import math
import random
import shutil
import struct
import subprocess

import pytest
from conftest import BINARY, DEMO, Server

CONFIG = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
    "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "vocab_size": 8192,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "eos_token_id": 0, "hidden_act": "silu",
}
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 6, "num_experts_per_tok": 2,
    "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0, "rope_theta": 150000, "rms_norm_eps": 1e-5, "vocab_size": 8192,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "eos_token_id": 0, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
    "quantization_config": {"quant_method": "mxfp4"},
}
# Random bytes to the high bytes of BF16 numbers between 2^-8 and 2^-4, of either sign.
HIGH = bytes((0x3B, 0x3C, 0x3C, 0x3D)[i % 4] | (0x80 if i & 128 else 0) for i in range(256))


def gpt_oss_shapes():
    h, inner, experts = GPT_OSS["hidden_size"], GPT_OSS["intermediate_size"], GPT_OSS["num_local_experts"]
    yield "model.embed_tokens.weight", (8192, h)
    yield "lm_head.weight", (8192, h)
    yield "model.norm.weight", (h,)
    for i in range(GPT_OSS["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", (h,)
        for name, rows, columns in (("q", 256, h), ("k", 128, h), ("v", 128, h), ("o", h, 256)):
            yield f"{layer}self_attn.{name}_proj.weight", (rows, columns)
            yield f"{layer}self_attn.{name}_proj.bias", (rows,)
        yield f"{layer}self_attn.sinks", (4,)
        yield f"{layer}mlp.router.weight", (experts, h)
        yield f"{layer}mlp.router.bias", (experts,)
        for name, rows, columns in (("gate_up", 2 * inner, h), ("down", h, inner)):
            yield f"{layer}mlp.experts.{name}_proj_blocks", (experts, rows, columns // 32, 16)
            yield f"{layer}mlp.experts.{name}_proj_scales", (experts, rows, columns // 32)
            yield f"{layer}mlp.experts.{name}_proj_bias", (experts, rows)


def shapes():
    h, inner, width = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["moe_intermediate_size"]
    q, kv, dim = 4 * 128, 2 * 128, 128
    yield "model.embed_tokens.weight", (8192, h)
    yield "lm_head.weight", (8192, h)
    yield "model.norm.weight", (h,)
    for i in range(3):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", (h,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{layer}self_attn.{name}_proj.weight", (rows, h)
            yield f"{layer}self_attn.{name}_proj.bias", (rows,)
        yield f"{layer}self_attn.o_proj.weight", (h, q)
        for name in ("q", "k"):
            yield f"{layer}self_attn.{name}_norm.weight", (dim,)
        blocks = {"mlp": inner} if i == 0 else {"mlp.shared_experts": width, **{f"mlp.experts.{e}": width for e in range(6)}}
        for block, rows in blocks.items():
            yield f"{layer}{block}.gate_proj.weight", (rows, h)
            yield f"{layer}{block}.up_proj.weight", (rows, h)
            yield f"{layer}{block}.down_proj.weight", (h, rows)
        if i > 0:
            yield f"{layer}mlp.gate.weight", (6, h)
            yield f"{layer}mlp.gate.e_score_correction_bias", (6,)


MODELS = {"glm4_moe": (CONFIG, shapes), "gpt_oss": (GPT_OSS, gpt_oss_shapes)}
SCALES = bytes(118 + i % 3 for i in range(256))  # of MXFP4 blocks


@pytest.fixture(scope="module", params=MODELS)
def model(tmp_path_factory, request):
    config, tensors = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    rng = random.Random(25)
    header, data, at = {}, [], 0
    for name, shape in tensors():
        count, dtype = math.prod(shape), "BF16"
        if name.endswith(("_blocks", "_scales")):
            block, dtype = rng.randbytes(count), "U8"
            block = block.translate(SCALES) if name.endswith("_scales") else block
        elif "norm" in name:
            block = b"\x80\x3f" * count
        else:
            block = bytearray(rng.randbytes(2 * count))
            block[1::2] = bytes(block[1::2]).translate(HIGH)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(block)]}
        data.append(bytes(block))
        at += len(block)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def run(*arguments):
    done = subprocess.run([BINARY, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_and_weights(model):
    ask = ["generate", "--model", model, "--prompt", "One two three", "--max-tokens", 12, "--temperature", 0, "--kv-memory", "64MiB"]
    alone = run(*ask)
    assert run(*ask) == alone
    assert run(*ask, "--threads", 1) == alone
    for options in (["--portable"], ["--kv", "oscar+"], ["--weights", "fp8"]):
        assert run(*ask, *options)


def test_calibrate_and_use(model, tmp_path):
    run("calibrate", "--model", model, "--tokens", 1200, "--out", tmp_path / "rotation", "--kv-memory", "64MiB")
    run("generate", "--model", model, "--rotation", tmp_path / "rotation", "--kv", "oscar", "--prompt", "One", "--max-tokens", 4,
        "--kv-memory", "64MiB")


def test_eval(model, tmp_path):
    run("eval", "--model", model, "--kv", "bf16,oscar+", "--suite", DEMO / "eval", "--tasks", "recall_4k", "--limit", 1, "--text", "none",
        "--out", tmp_path / "eval", "--kv-memory", "64MiB")


def ask(server, prompt):
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 16, "temperature": 0})
        assert answer.status_code == 200, answer.text
        return answer.json()


def answers(model, prompt, count, *options):
    """Texts and cached tokens of the same prompt, asked several times of one process."""
    server = Server("--prefill-cell", "64", *options, model=model).ready()
    try:
        given = [ask(server, prompt) for _ in range(count)]
    finally:
        server.stop()
    return ([answer["choices"][0]["text"] for answer in given],
            [answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) for answer in given])


def test_server_prefix_cache(model):
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    texts, cached = answers(model, prompt, 3, "--deterministic")
    assert len(set(texts)) == 1, texts
    assert cached[0] == 0 and min(cached[1:]) > 0, cached


def test_server_prefix_folder(model, tmp_path):
    prompt = "The quick brown fox jumps over the lazy dog. " * 150
    folder = ("--prefix-dir", tmp_path / "prefixes")
    _, cached = answers(model, prompt, 1, *folder)
    assert cached == [0]
    _, cached = answers(model, prompt, 1, *folder)  # a second process finds the first one's pages
    assert cached[0] > 1000, cached  # sealed pages, and what windows see at the end of them
