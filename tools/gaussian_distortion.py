#!/usr/bin/env python3
"""Prints the distortion of KV quantisers on Gaussian rows (D = 128): relative squared error.

An independent numpy simulation in double precision with exact metadata; the tests of src/quant
compare the library's codecs, through their bytes, with these numbers.
"""
import numpy as np

D, ROWS, PAGE = 128, 40000, 128
# Max, 1960, table I: the positive levels.
LLOYD_MAX = {2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152],
             4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]}


def min_max(x, bits, group=D):
    g = x.reshape(len(x), -1, group)
    lo, hi, levels = g.min(-1, keepdims=True), g.max(-1, keepdims=True), 2 ** bits - 1
    s = (hi - lo) / levels
    return (np.clip(np.floor((g - lo) / s + 0.5), 0, levels) * s + lo).reshape(x.shape)


def symmetric(x, bits):
    half = 2 ** (bits - 1)
    s = np.abs(x).max(-1, keepdims=True) / (half - 1)
    return np.clip(np.rint(x / s), -half, half - 1) * s


def nearest(x, bits):
    levels = np.array([-v for v in reversed(LLOYD_MAX[bits])] + LLOYD_MAX[bits])
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


def turboquant(x, bits, renormalise):
    n = np.linalg.norm(x, axis=-1, keepdims=True)
    c = nearest(x / n * D ** 0.5, bits)
    length = np.linalg.norm(c, axis=-1, keepdims=True) if renormalise else D ** 0.5
    return c / length * n


def lloyd_max(x, bits):
    m, sd = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    return nearest((x - m) / sd, bits) * sd + m


def fit(x, bits, group, unbiased):
    """Best of five steps, least-squares refit, optionally rescaled to keep <xc, x^c>."""
    g = x.reshape(-1, group)
    m, sd = g.mean(-1, keepdims=True), g.std(-1, keepdims=True)
    half, best, best_error = 2 ** (bits - 1), np.zeros_like(g), np.full((len(g), 1), np.inf)
    for f in (0.75, 0.85, 0.95, 1.05, 1.15):
        step = f * {2: 1.0, 3: 0.5884, 4: 0.3365}[bits] * sd
        q = np.clip(np.floor((g - m) / step), -half, half - 1)
        qc = q - q.mean(-1, keepdims=True)
        y = qc * ((qc * (g - m)).sum(-1, keepdims=True) / (qc ** 2).sum(-1, keepdims=True))
        error = ((g - m - y) ** 2).sum(-1, keepdims=True)
        best = np.where(error < best_error, y, best)
        best_error = np.minimum(error, best_error)
    if unbiased:
        xc = g - m
        best = best * ((xc * xc).sum(-1, keepdims=True) / (xc * best).sum(-1, keepdims=True))
    return (best + m).reshape(x.shape)


def kitty(x, boosted):
    """Pages of 128 tokens and 128 channels; per-channel min/max over the page."""
    y = np.empty_like(x)
    for page in range(0, len(x) // PAGE * PAGE, PAGE):
        block = x[page:page + PAGE].T
        order = np.argsort(-np.abs(block).mean(1), kind="stable")
        out = min_max(block, 2, PAGE)
        out[order[:boosted]] = min_max(block[order[:boosted]], 4, PAGE)
        y[page:page + PAGE] = out.T
    return y


def main():
    x = np.random.default_rng(7).standard_normal((ROWS // PAGE * PAGE, D))
    rows = {
        "min/max 2 bits": min_max(x, 2), "min/max 3 bits": min_max(x, 3),
        "min/max 4 bits": min_max(x, 4), "symmetric 2 bits": symmetric(x, 2),
        "symmetric 4 bits": symmetric(x, 4),
        **{f"Lloyd-Max {b} bits": lloyd_max(x, b) for b in (2, 3, 4)},
        **{f"turboquant {b} bits": turboquant(x, b, False) for b in (2, 3, 4)},
        **{f"turboquant {b} bits renormalised": turboquant(x, b, True) for b in (2, 3, 4)},
        **{f"{'unbiased ' if u else ''}fit {b} bits, group {g}": fit(x, b, g, u)
           for u in (False, True) for b, g in ((2, 128), (2, 64), (2, 32), (3, 128), (4, 128))},
        "kitty 1/8": kitty(x, D // 8), "kitty 1/4": kitty(x, D // 4),
    }
    for name, y in rows.items():
        print(f"{name:32s} {((x - y) ** 2).sum() / (x ** 2).sum():.4f}")


if __name__ == "__main__":
    main()
