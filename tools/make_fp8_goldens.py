#!/usr/bin/env python3
"""Writes tests/data/fp8: FP8 E4M3 matrices with scales for blocks, rows and the whole, as published
checkpoints store them, and what they multiply out to. Uses nothing but Python's integers and
fractions, so that it shares no arithmetic with the library.

    python3 tools/make_fp8_goldens.py tests/data/fp8
"""
import json
import math
import struct
import sys
from fractions import Fraction
from pathlib import Path


def e4m3(code):
    """The value of a code: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; 0x7f and 0xff are NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    assert not (exponent == 15 and mantissa == 7)
    if exponent == 0:
        magnitude = Fraction(mantissa, 8) * Fraction(1, 2**6)
    else:
        magnitude = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -magnitude if code & 0x80 else magnitude


class Lcg:
    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % n


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main(folder):
    rng = Lcg(2026)
    codes = [c for c in range(256) if c & 0x7F != 0x7F]
    stored, expected = {}, {}

    def add(name, outputs, inputs, scale_name, scale_dtype, scale_shape, scale_of):
        rows = [[codes[rng.below(len(codes))] for _ in range(inputs)] for _ in range(outputs)]
        rows[0][: min(inputs, len(codes))] = codes[: min(inputs, len(codes))]
        count = 1
        for side in scale_shape:
            count *= side
        # Scales between 2^-12 and 2^-3 with as many bits as their type holds.
        bits = 24 if scale_dtype == "F32" else 8
        scales = [
            Fraction(2 ** (bits - 1) + rng.below(2 ** (bits - 1)), 2 ** (bits - 1))
            / 2 ** (4 + rng.below(9))
            for _ in range(count)
        ]
        packed = b"".join(struct.pack("<f", float(s)) for s in scales)
        if scale_dtype == "BF16":
            packed = b"".join(packed[i + 2 : i + 4] for i in range(0, len(packed), 4))
        stored[name] = ("F8_E4M3", [outputs, inputs], bytes(c for row in rows for c in row))
        stored[scale_name] = (scale_dtype, scale_shape, packed)
        # 4 bits times at most 24 are exact as a double; packing rounds to nearest, ties to even.
        values = [
            # Fractions have no negative zero.
            struct.pack("<f", math.copysign(float(abs(e4m3(code)) * scales[scale_of(i, j)]), -1 if code & 0x80 else 1))
            for i, row in enumerate(rows)
            for j, code in enumerate(row)
        ]
        expected[name] = ("F32", [outputs, inputs], b"".join(values))

    add("block.weight", 130, 260, "block.weight_scale_inv", "F32", [2, 3], lambda i, j: i // 128 * 3 + j // 128)
    add("block_bf16.weight", 129, 128, "block_bf16.weight_scale_inv", "BF16", [2, 1], lambda i, j: i // 128)
    add("channel.weight", 24, 96, "channel.weight_scale", "F32", [24, 1], lambda i, j: i)
    add("channel_flat.weight", 16, 64, "channel_flat.weight_scale", "BF16", [16], lambda i, j: i)
    add("tensor.weight", 8, 40, "tensor.weight_scale", "F32", [], lambda i, j: 0)
    add("tensor_one.weight", 8, 40, "tensor_one.weight_scale", "F32", [1], lambda i, j: 0)
    # What readers must refuse.
    stored["nan.weight"] = ("F8_E4M3", [2, 4], bytes([0, 1, 2, 3, 4, 0x7F, 6, 7]))
    stored["nan.weight_scale"] = ("F32", [1], struct.pack("<f", 1.0))
    stored["bare.weight"] = ("F8_E4M3", [2, 4], bytes(8))
    stored["odd.weight"] = ("F8_E4M3", [2, 4], bytes(8))
    stored["odd.weight_scale"] = ("F32", [3], struct.pack("<3f", 1, 1, 1))
    stored["infinite.weight"] = ("F8_E4M3", [2, 4], bytes(8))
    stored["infinite.weight_scale"] = ("F32", [2], struct.pack("<2f", 1, float("inf")))
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", stored)
    write_safetensors(folder / "expected.safetensors", expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
