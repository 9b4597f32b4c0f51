#!/usr/bin/env python3
"""Writes tests/data/rotation/golden.safetensors: a small synthetic capture of Q, K and V and the
second moments and rotations that the published formulas give for it, computed with numpy in fp64.
(Made with Python 3.11 and numpy 2.4; any recent numpy gives the same to rounding.)

usage: tools/make_rotation_golden.py OUTPUT_FILE

Two layers (ids 1 and 4: a gap), 4 query heads, 2 KV heads, D = 16, two chunks of packed sequences.
Nothing here shares code with src/: softmax scores are full matrices, covariances are einsums, the
Hadamard matrix is a Kronecker product, the permutation is applied as a matrix.
"""
import json
import struct
import sys

import numpy as np

HQ, HKV, D = 4, 2, 16
GROUP = HQ // HKV
CHUNKS = [[7, 13], [20, 1, 9]]  # sequence lengths, by chunk
LAYERS = [1, 4]


def to_bf16(x):
    """Round to nearest even; returns (bits, value)."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def hadamard(n):
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    return h / np.sqrt(n)  # one division: exact at n = 16, so that ties of the 2-bit codes stay ties


def bit_reversal_matrix(eigenvalues):
    bits = D.bit_length() - 1
    order = np.argsort(-eigenvalues, kind="stable")
    perm = np.zeros(D, int)
    for i in range(D):
        perm[int(format(i, f"0{bits}b")[::-1], 2)] = order[i]
    return np.eye(D)[:, perm]


def softmax_scores(q, k):
    t = q.shape[0]
    logits = q @ k.T / np.sqrt(D)
    logits[np.triu_indices(t, 1)] = -np.inf
    s = np.exp(logits - logits.max(1, keepdims=True))
    return s / s.sum(1, keepdims=True)


def simulate_int2(x):
    mn, mx = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    s = np.maximum(mx - mn, 1e-8) / 3
    return np.clip(np.floor((x - mn) / s + 0.5), 0, 3) * s + mn


def moments(q, k, v, seq_lens):
    """Per KV head: [HKV, D, D] each."""
    t = q.shape[0]
    out = {n: np.zeros((HKV, D, D)) for n in ("qqt", "ktk", "sst", "sst_exact", "vtv")}
    for h in range(HKV):
        qh = q[:, h * GROUP:(h + 1) * GROUP].reshape(t * GROUP, D)
        a = qh.T @ qh / (t * GROUP)
        w = np.einsum("td,de,te->t", k[:, h], a, k[:, h])
        w = w / max(w.sum(), 1e-12) * t
        out["qqt"][h] = a
        out["ktk"][h] = k[:, h].T @ k[:, h] / t
        out["vtv"][h] = v[:, h].T @ v[:, h] / t
        out["sst"][h] = np.einsum("t,td,te->de", w, v[:, h], v[:, h]) / t
        first = 0
        for n in seq_lens:
            part = slice(first, first + n)
            for g in range(GROUP):
                s = softmax_scores(q[part, h * GROUP + g], k[part, h])
                vh = v[part, h]
                out["sst_exact"][h] += vh.T @ s.T @ s @ vh / (t * GROUP)
            first += n
    return out


def residual_moment(x, reference):
    """Of what 2-bit min/max rows lose under a reference rotation, for uresidual; mean over heads."""
    residual = np.zeros((D, D))
    for h in range(HKV):
        y = x[:, h] @ reference
        e = y - simulate_int2(y)
        residual += e.T @ e / x.shape[0] / HKV
    return residual


def main(path):
    rng = np.random.default_rng(20250701)
    tensors = {}
    for layer in LAYERS:
        lens = sum(CHUNKS, [])
        t = sum(lens)
        # Channels of very different size, an outlier channel in K, a mean, and heads that differ.
        size = np.exp(rng.normal(0, 1, (3, 1, D)))
        q = rng.normal(0, 1, (t, HQ, D)) @ rng.normal(0, 0.4, (D, D)) + size[0] * rng.normal(0, 1, (t, HQ, D))
        k = size[1] * rng.normal(0, 1, (t, HKV, D)) + rng.normal(0, 1, (HKV, D))
        k[..., 3] += 6
        v = size[2] * rng.normal(0, 1, (t, HKV, D)) @ rng.normal(0, 0.3, (D, D))
        values = {}
        for name, x in (("q", q), ("k", k), ("v", v)):
            bits, values[name] = to_bf16(x)
            first = 0
            for c, chunk in enumerate(CHUNKS):
                tensors[f"{layer}.{name}.{c}"] = ("BF16", bits[first:first + sum(chunk)])
                first += sum(chunk)
        found = moments(values["q"], values["k"], values["v"], lens)
        for name, m in found.items():
            tensors[f"{layer}.{name}"] = ("F64", m)
        for name, side in (("qqt", "k"), ("sst", "v")):
            mean = found[name].mean(0)
            mean = (mean + mean.T) / 2
            lam, u = np.linalg.eigh(mean)
            h, p = hadamard(D), bit_reversal_matrix(lam)
            tensors[f"{layer}.{side}.eigenvalues"] = ("F64", lam)
            # What does not depend on the signs of eigenvectors: R^T C R (for h_r_pbr and h_pbr_r: its magnitudes).
            for composition, m in (("plain", u), ("pbr", p), ("br", u @ p), ("br_h128", u @ p @ h), ("r_h", u @ h),
                                   ("h_pbr", h @ p), ("r_h_pbr", u @ h @ p), ("h_r_pbr", h @ u @ p), ("h_pbr_r", h @ p @ u)):
                tensors[f"{layer}.{side}.{composition}"] = ("F64", m.T @ mean @ m)
            tensors[f"{layer}.{side}.residual"] = ("F64", residual_moment(values[side], h))
    for c, chunk in enumerate(CHUNKS):
        tensors[f"seq_lens.{c}"] = ("I32", np.array(chunk, np.int32))

    header, data = {"__metadata__": {"made_by": "tools/make_rotation_golden.py"}}, b""
    width = {"F64": 8, "I32": 4, "BF16": 2}
    for name, (dtype, x) in sorted(tensors.items(), key=lambda item: (-width[item[1][0]], item[0])):
        raw = np.ascontiguousarray(x).tobytes()
        header[name] = {"dtype": dtype, "shape": list(np.shape(x)), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
