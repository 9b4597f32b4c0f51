#!/usr/bin/env python3
"""Writes tests/data/tiny-llama: a random Llama checkpoint of 77K parameters (GQA, untied head, llama3 RoPE scaling)
as BF16 in one file, as F16 in three shards and as F32, and what transformers computes with it in fp32.

  pip install torch transformers safetensors && python3 tools/make_llama_golden.py tests/data/tiny-llama
"""
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

out = pathlib.Path(sys.argv[1])
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256,
    "rms_norm_eps": 1e-05, "max_position_embeddings": 512, "rope_theta": 500000.0,
    # Original context 64: the 200 golden tokens reach all three ranges of frequencies.
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}


def write(folder, tensors, dtype, shards):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": str(dtype).split(".")[1]}, indent=1) + "\n")
    tensors = {name: t.to(dtype).contiguous() for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, index = sorted(tensors), {}
    for s in range(shards):
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in names[s::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index.update({n: file for n in part})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1, sort_keys=True) + "\n")


torch.set_num_threads(1)
generator = torch.Generator().manual_seed(20261115)
config = transformers.LlamaConfig(**CONFIG)
config._attn_implementation = "eager"
model = transformers.LlamaForCausalLM(config).float().eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1.0 + 0.1 * noise
        elif "embed" in name:
            value = noise
        else:
            scale = {"q_proj": 1.6, "k_proj": 1.6, "lm_head": 2.0}
            value = noise / parameter.shape[1] ** 0.5 * next((s for n, s in scale.items() if n in name), 1.0)
        # Rounded to numbers that BF16, F16 and F32 all hold.
        parameter.copy_(value.to(torch.float16).to(torch.bfloat16).to(torch.float16).float())
tensors = {name: p.detach() for name, p in model.named_parameters()}
write(out / "bf16", tensors, torch.bfloat16, 1)
write(out / "f16-sharded", tensors, torch.float16, 3)
write(out / "f32", tensors, torch.float32, 1)


def continue_greedily(ids, steps):
    """Tokens and the smallest gap between the two best logits; stops where BF16 could decide otherwise."""
    tokens, greedy, smallest = ids, [], float("inf")
    for _ in range(steps):
        top = torch.topk(model(tokens[None]).logits[0, -1], 2)
        smallest = min(smallest, float(top.values[0] - top.values[1]))
        if smallest < 0.12:
            return None, smallest
        greedy.append(int(top.indices[0]))
        tokens = torch.cat([tokens, top.indices[:1]])
    return greedy, smallest


with torch.no_grad():
    greedy = None
    while greedy is None:
        ids = torch.randint(2, 256, (200,), generator=generator)
        greedy, gap = continue_greedily(ids, 6)
    logits = model(ids[None]).logits[0]
save_file({"logits": logits[8::8].contiguous()}, out / "golden.safetensors")
golden = {"made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, eager attention",
          "ids": ids.tolist(), "positions": list(range(8, 200, 8)), "greedy_ids": greedy,
          "smallest_gap": gap, "largest_logit": float(logits.abs().max())}
(out / "golden.json").write_text(json.dumps(golden) + "\n")
print("smallest gap", gap, "largest logit", golden["largest_logit"])
