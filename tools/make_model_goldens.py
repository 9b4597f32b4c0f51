#!/usr/bin/env python3
"""Writes tests/data/tiny-models: for every model family a tiny config with all of its features on, and what transformers
computes with it in fp32. The weights are not stored: they come from a generator that src/engine/tiny_checkpoint.h has too.

  pip install torch transformers safetensors && python3 tools/make_model_goldens.py tests/data/tiny-models
"""
import json
import math
import pathlib
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SEED = 20261118
COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-05, "max_position_embeddings": 512, "vocab_size": 160,
          "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CHANNEL_FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
               "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                   "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}}}
QWEN3_MOE = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 160,
             "intermediate_size": 96, "moe_intermediate_size": 144, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3,
             "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1, "rope_theta": 1000000.0,
             "attention_bias": False, "use_sliding_window": False, "sliding_window": None}
GLM = {**COMMON, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 96,
       "intermediate_size": 120, "moe_intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
       "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
       "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000.0,
       "num_nextn_predict_layers": 1}
MINIMAX = {**COMMON, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 128,
           "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
           "head_dim": 64, "rotary_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "use_qk_norm": True,
           "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True, "rope_theta": 5000000,
           "shared_intermediate_size": 0, "attn_type_list": [1, 1]}
# Gated DeltaNet beside gated attention: every feature, two dtypes of what the state needs, nested and not.
LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "attention_bias": False}
MROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
         "mrope_section": [3, 3, 2]}
QWEN35 = {**COMMON, **LINEAR, "model_type": "qwen3_5_text", "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 4,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "rope_parameters": MROPE,
          "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
          "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
QWEN35_MOE = {**COMMON, **LINEAR, "model_type": "qwen3_5_moe_text", "hidden_size": 128, "moe_intermediate_size": 48,
              "shared_expert_intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 64, "rope_parameters": MROPE, "linear_num_value_heads": 6, "full_attention_interval": 2,
              "num_experts": 8, "num_experts_per_tok": 3}
NEXT = {**COMMON, **LINEAR, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 96,
        "intermediate_size": 80, "moe_intermediate_size": 44, "shared_expert_intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "linear_key_head_dim": 16, "linear_value_head_dim": 40, "full_attention_interval": 3, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1}


def nested(text, architecture, **more):
    """As a multimodal checkpoint has it."""
    return {"architectures": [architecture], "model_type": text["model_type"].removesuffix("_text"), "text_config": text,
            "tie_word_embeddings": False, "vision_config": {"depth": 2}, **more}


GPT_OSS = {**COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 96,
           "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
           "num_local_experts": 6, "num_experts_per_tok": 2, "experts_per_token": 2, "attention_bias": True,
           "sliding_window": 10, "swiglu_limit": 1.5, "initial_context_length": 128, "rope_theta": 150000,
           "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
           "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 128,
                            "rope_type": "yarn", "truncate": False}}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                             "model.embed_tokens", "lm_head"]}
CASES = {
    "qwen2": {**COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128,
              "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16,
              "max_window_layers": 1},
    "mistral": {**COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 96,
                "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 64, "rope_theta": 1000000.0, "sliding_window": None},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_fp8": {**QWEN3_MOE, "quantization_config": FP8},
    "glm4_moe": GLM,
    "glm4_moe_fp8": {**GLM, "quantization_config": CHANNEL_FP8},
    "minimax_m2": MINIMAX,
    "minimax_m2_fp8": {**MINIMAX, "quantization_config": FP8},
    "qwen3_5": nested(QWEN35, "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": nested(QWEN35_MOE, "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_5_moe_fp8": nested(QWEN35_MOE, "Qwen3_5MoeForConditionalGeneration", quantization_config=FP8),
    "qwen3_next": NEXT,
    "gpt_oss": GPT_OSS,
    "gpt_oss_mxfp4": {**GPT_OSS, "quantization_config": MXFP4},
}
PROMPT, GREEDY = 24, 64
ROUTER_GAP = 0.004  # between the last expert that is chosen and the next: BF16 activations choose the same


# --- The generator ----------------------------------------------------------------------------------------------------
def philox(seed, stream, count):
    """`count` 32-bit words: Philox4x32-10, four a block."""
    index = np.arange((count + 3) // 4, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    c = [index & mask, index >> np.uint64(32), np.full_like(index, stream & 0xFFFFFFFF), np.full_like(index, stream >> 32)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), p1 & mask, (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).reshape(-1)[:count]


def uniform(name, shape):
    """In [-1, 1), of 16 bits, by the tensor's name."""
    stream = 0xCBF29CE484222325
    for byte in name.encode():
        stream = ((stream ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    bits = philox(SEED, stream, math.prod(shape))
    return ((bits >> np.uint64(16)).astype(np.float64) - 32768.0) / 32768.0


def shape_of(name, inputs, around_zero=False):
    """Offset and amplitude of a tensor's numbers."""
    if name.endswith("A_log"):
        return 0.0, 1.0
    if name.endswith("dt_bias"):
        return -2.0, 2.0
    if "norm" in name:
        return (0.0 if around_zero and "linear_attn" not in name else 1.0), 0.25
    if "e_score_correction_bias" in name:
        return 0.0, 0.2
    if name.endswith(".bias") or name.endswith("_bias"):
        return 0.0, 0.5
    if name.endswith(".sinks"):
        return 0.5, 1.0
    if "embed_tokens" in name:
        return 0.0, 0.25
    gain = 1.0
    if "lm_head" in name or name.endswith("gate.weight") or name.endswith("router.weight"):
        gain = 2.0
    elif "q_proj" in name or "k_proj" in name:
        gain = 1.5
    elif "down_proj" in name or ".w2." in name:
        gain = 0.7
    return 0.0, gain * math.sqrt(3.0 / inputs)


def plain(name, shape, bf16=True, around_zero=False):
    input_major = "experts" in name and len(shape) == 3  # gpt-oss: [experts, inputs, outputs]
    offset, amplitude = shape_of(name, shape[1] if input_major else shape[-1], around_zero)
    values = torch.from_numpy((offset + amplitude * uniform(name, shape)).astype(np.float32)).reshape(shape)
    return values.bfloat16().float() if bf16 else values


def fp8(name, shape, quantization, scale_bf16):
    """What codes and scales multiply out to."""
    codes = torch.from_numpy((300.0 * uniform(name, shape)).astype(np.float32)).to(torch.float8_e4m3fn).float().reshape(shape)
    blocks = quantization["quant_method"] == "fp8"
    rows, columns = (128, 128) if blocks else (1, shape[1])
    scale_name = name + ("_scale_inv" if blocks else "_scale")
    scale_shape = (-(-shape[0] // rows), -(-shape[1] // columns))
    _, amplitude = shape_of(name, shape[1])
    scales = torch.from_numpy((amplitude / 300.0 * (1.0 + 0.5 * uniform(scale_name, scale_shape))).astype(np.float32))
    if scale_bf16:
        scales = scales.bfloat16().float()
    scales = scales.reshape(scale_shape).repeat_interleave(rows, 0)[:shape[0]].repeat_interleave(columns, 1)[:, :shape[1]]
    return codes * scales


def mxfp4(name, shape):
    """What blocks and scales multiply out to; [experts, inputs, outputs]."""
    experts, inputs, outputs = shape
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    codes = torch.from_numpy(((uniform(name + "_blocks", (experts, outputs, inputs)) + 1.0) * 8.0).astype(np.int64))
    _, amplitude = shape_of(name, inputs)
    middle = 127 + round(math.log2(amplitude / math.sqrt(3.0) / 2.93))
    blocks = (experts, outputs, inputs // 32)
    exponents = middle + np.floor(uniform(name + "_scales", blocks) + 1.0).astype(np.int64) - 1
    scales = torch.from_numpy(np.exp2(exponents.astype(np.float64) - 127).astype(np.float32)).reshape(blocks)
    values = table[codes].reshape(experts, outputs, inputs) * scales.repeat_interleave(32, 2)
    return values.transpose(1, 2)


class Weights:
    def __init__(self, config):
        self.config = config
        self.around_zero = config["model_type"].startswith(("qwen3_5", "qwen3_next"))

    def __call__(self, name, shape):
        if self.config["model_type"] == "qwen3_5_moe" and name.endswith(("A_log", "linear_attn.norm.weight")):
            return plain(name, shape, bf16=False)
        minimax = self.config["model_type"] == "minimax_m2"
        if self.config["model_type"] == "gpt_oss" and len(shape) == 3 and "quantization_config" in self.config:
            return mxfp4(name, shape)
        if self.config["model_type"] == "gpt_oss":
            return plain(name, shape)
        if name.endswith("e_score_correction_bias") or (minimax and name.endswith("gate.weight")):
            return plain(name, shape, bf16=False)
        plain_ones = (".gate.weight", "_expert_gate.weight", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")
        is_linear = len(shape) == 2 and ".layers." in name and not name.endswith(plain_ones)
        if is_linear and "quantization_config" in self.config:
            return fp8(name, shape, self.config["quantization_config"], scale_bf16=not minimax)
        return plain(name, shape, around_zero=self.around_zero)


def fill(model, config):
    weights = Weights(config)
    minimax = config["model_type"] == "minimax_m2"
    with torch.no_grad():
        tensors = list(model.named_parameters()) + [b for b in model.named_buffers() if "correction_bias" in b[0]]
        for name, target in tensors:
            disk = name.replace(".mlp.", ".block_sparse_moe.") if minimax else name
            if "text_config" in config and disk.startswith("model."):
                disk = disk.replace("model.", "model.language_model.", 1)
            if config["model_type"] != "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                base = disk.rsplit(".", 1)[0]
                gate, up, down = ("w1", "w3", "w2") if minimax else ("gate_proj", "up_proj", "down_proj")
                for e in range(target.shape[0]):
                    if name.endswith("down_proj"):
                        target[e] = weights(f"{base}.{e}.{down}.weight", tuple(target.shape[1:]))
                        continue
                    half = (target.shape[1] // 2, target.shape[2])
                    target[e] = torch.cat([weights(f"{base}.{e}.{part}.weight", half) for part in (gate, up)])
            else:
                target.copy_(weights(disk, tuple(target.shape)))


# --- transformers -----------------------------------------------------------------------------------------------------
def make_model(config):
    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "architectures", "rotary_dim")}
    hf = transformers.AutoConfig.for_model(**fields.get("text_config", fields))
    if "rotary_dim" in config:  # which this version of the class does not read
        hf.rope_parameters["partial_rotary_factor"] = config["rotary_dim"] / config["head_dim"]
    hf._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf).float().eval()
    if "swiglu_limit" in config:  # which this version of the class does not read
        for layer in model.model.layers:
            layer.mlp.experts.limit = config["swiglu_limit"]
    fill(model, config)
    return model


def watch_routers(model, config, gaps):
    """Appends, for each router that runs, how far apart chosen and not chosen experts are, by position."""
    sigmoid = not config["model_type"].startswith(("qwen3", "gpt_oss"))
    config = config.get("text_config", config)
    k, groups, kept = config.get("num_experts_per_tok", 0), config.get("n_group", 1), config.get("topk_group", 1)

    def hook(block, arguments, _output):
        x = arguments[0].reshape(-1, arguments[0].shape[-1])
        router = block.gate if hasattr(block, "gate") else block.router
        scores = x @ router.weight.float().T
        if router is not getattr(block, "gate", None):  # gpt-oss
            scores = scores + router.bias
        scores = torch.sigmoid(scores) if sigmoid else torch.softmax(scores, -1)
        bias = getattr(router, "e_score_correction_bias", getattr(block, "e_score_correction_bias", None))
        if bias is not None:
            scores = scores + bias
        gap = torch.full((len(x),), float("inf"))
        if groups > 1:
            totals = scores.view(len(x), groups, -1).topk(2, -1).values.sum(-1)
            ordered = totals.sort(-1, descending=True).values
            gap = torch.minimum(gap, ordered[:, kept - 1] - ordered[:, kept])
            mask = torch.zeros_like(totals).scatter_(1, totals.topk(kept, -1).indices, 1).bool()
            scores = scores.masked_fill(~mask.repeat_interleave(scores.shape[1] // groups, 1), -1e9)
        ordered = scores.sort(-1, descending=True).values
        gaps.append(torch.minimum(gap, ordered[:, k - 1] - ordered[:, k]))

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate") or hasattr(layer.mlp, "router"):
            layer.mlp.register_forward_hook(hook)


def run(model, gaps, ids):
    gaps.clear()
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    routed = torch.stack(gaps).min(0).values if gaps else torch.full((len(ids),), 1e9)
    return logits, routed


def main():
    out = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    tensors, golden = {}, {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, eager attention",
                           "seed": SEED, "cases": {}}
    for case, config in CASES.items():
        (out / case).mkdir(parents=True, exist_ok=True)
        (out / case / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        model, gaps = make_model(config), []
        watch_routers(model, config, gaps)
        generator = np.random.default_rng(7)
        with torch.no_grad():
            best = None
            for _ in range(400):  # a prompt on which rounding to BF16 cannot choose other experts
                ids = generator.integers(2, COMMON["vocab_size"], PROMPT).tolist()
                logits, routed = run(model, gaps, ids)
                if best is None or float(routed.min()) > best[0]:
                    best = (float(routed.min()), ids, logits)
                if best[0] > ROUTER_GAP:
                    break
            smallest, ids, logits = best
            positions = [0, 1, 7, 15, 22, 23]
            tensors[case] = logits[positions].contiguous()
            tokens, top_gaps, router_gaps = list(ids), [], []
            for _ in range(GREEDY):
                step, routed = run(model, gaps, tokens)
                top = torch.topk(step[-1], 2)
                top_gaps.append(round(float(top.values[0] - top.values[1]), 4))
                router_gaps.append(round(min(float(routed[-1]), 1.0), 5))
                tokens.append(int(top.indices[0]))
        golden["cases"][case] = {"ids": ids, "positions": positions, "greedy_ids": tokens[PROMPT:], "top_gaps": top_gaps,
                                 "router_gaps": router_gaps, "prompt_router_gap": round(min(smallest, 1.0), 5)}
        print(f"{case}: router gap {smallest:.4f}, logits up to {float(logits.abs().max()):.2f}, "
              f"{sum(g > 0.16 for g in top_gaps)} of {GREEDY} greedy gaps above 0.16")
    save_file(tensors, out / "golden.safetensors")
    (out / "golden.json").write_text(json.dumps(golden) + "\n")


main()
