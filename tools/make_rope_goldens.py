#!/usr/bin/env python3
"""Prints the RoPE frequencies that src/model/rope_test.cc compares with, from transformers' own code.

  pip install torch transformers && python3 tools/make_rope_goldens.py
"""
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def show(name, config, kind, indices):
    frequency, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    print(name, {i: repr(float(frequency[i])) for i in indices}, "magnitude", magnitude)


llama = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192, rope_theta=500000.0)
show("llama3", LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=llama, rope_theta=500000.0,
                           max_position_embeddings=131072), "llama3", (0, 20, 30, 34, 63))
yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6)
show("yarn", Qwen3Config(hidden_size=4096, num_attention_heads=32, head_dim=128, rope_parameters=yarn, rope_theta=1e6,
                         max_position_embeddings=131072), "yarn", (10, 25, 35, 63))
