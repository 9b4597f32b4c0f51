#!/usr/bin/env python3
"""Writes tests/data/quant/row_goldens.json: exact codes and metadata of the row quantiser.

An independent implementation of the header comment of src/quant/row_quantizer.h in numpy, whose
float32 operations are IEEE binary32 and never fused. Run from the repository root; the output is
checked in, so that the tests need no Python.
"""
import json

import numpy as np

F = np.float32
D = 128


def bf16(x):
    """Rounds to nearest even to BF16; returns the 16-bit words."""
    u = np.asarray(x, dtype=F).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint32)


def widen(words):
    return (words.astype(np.uint32) << 16).view(F)


def round_meta(x, meta):
    if meta == "fp16":
        return F(np.float16(np.clip(F(x), F(-65504), F(65504))))
    if meta == "bf16":
        return widen(bf16(np.array([x], dtype=F)))[0]
    return F(x)


def sum16(x):
    lane = x[:16].astype(F).copy()
    for i in range(16, len(x), 16):
        lane = lane + x[i:i + 16]
    for width in (8, 4, 2, 1):
        lane = lane[:width] + lane[width:2 * width]
    return F(lane[0])


def floor_scale(s):
    return max(F(s), F(2.0 ** -24))


def min_max(x, bits, meta):
    levels = F(2 ** bits - 1)
    s = floor_scale(round_meta(max(F(x.max() - x.min()), F(1e-8)) / levels, meta))
    m = round_meta(x.min(), meta)
    q = np.clip(np.floor((x - m) / s + F(0.5)), F(0), levels)
    return q.astype(int), s, m


def symmetric(x, bits, meta):
    half = F(2 ** (bits - 1))
    s = floor_scale(round_meta(max(np.abs(x).max(), F(1e-8)) / (half - F(1)), meta))
    q = np.clip(np.rint(x / s), -half, half - F(1)) + half
    return q.astype(int), s, F(-half * s)


def mse_fit(x, bits, meta, unbiased):
    n = F(len(x))
    mean = F(sum16(x) / n)
    xc = x - mean
    sxx = sum16(xc * xc)
    sd = np.sqrt(F(sxx / n))
    half = 2 ** (bits - 1)
    relative = {2: F(1.0), 3: F(0.5884), 4: F(0.3365)}[bits]
    best = None
    for factor in (0.75, 0.85, 0.95, 1.05, 1.15):
        step = F(F(F(factor) * relative) * sd)
        if bits == 2:
            q = (xc >= -step).astype(int) + (xc >= 0) + (xc >= step)
        else:
            q = np.clip(np.floor(xc / step), -half, half - 1).astype(int) + half
        total, squares = int(q.sum()), int((q * q).sum())
        variance = F(F(len(x) * squares - total * total) / n)
        sqx = sum16(q.astype(F) * xc)
        score = F(F(sqx * sqx) / variance)
        if best is None or score > best[0]:
            best = (score, q, F(sqx / variance), sqx, total)
    _, q, slope, sqx, total = best
    if unbiased:
        slope = F(slope * np.clip(F(sxx / F(slope * sqx)), F(0.5), F(2)))
    s = floor_scale(round_meta(slope, meta))
    return q, s, round_meta(mean - F(s * F(F(total) / n)), meta)


def lloyd_max(x, meta):
    n = F(len(x))
    mean = F(sum16(x) / n)
    xc = x - mean
    sd = np.sqrt(F(F(sum16(xc * xc) / n) + F(1e-8)))
    step = F(F(0.9810652732849121) * sd)
    q = (xc >= -step).astype(int) + (xc >= 0) + (xc >= step)
    slope = F(F(F(F(2) * F(1.5095585584640503)) / F(3)) * F(1.16))
    s = floor_scale(round_meta(F(slope * sd), meta))
    return q, s, round_meta(mean - F(F(1.5) * s), meta)


def quantise(row, spec):
    x = np.clip(row, F(-65504), F(65504))
    if spec["clip"] > 0:
        index = min(int(np.floor(float(F(spec["clip"])) * len(x))), len(x) - 1)
        t = np.sort(np.abs(x))[index]
        x = np.clip(x, -t, t)
    codes, scales, mins = [], [], []
    for start in range(0, len(x), spec["group"]):
        part = x[start:start + spec["group"]]
        if spec["rule"] == "minmax":
            q, s, m = min_max(part, spec["bits"], spec["meta"])
        elif spec["rule"] == "symmetric":
            q, s, m = symmetric(part, spec["bits"], spec["meta"])
        elif spec["rule"] == "lloyd_max":
            q, s, m = lloyd_max(part, spec["meta"])
        else:
            q, s, m = mse_fit(part, spec["bits"], spec["meta"], spec["rule"] == "mse_unbiased")
        codes += [int(c) for c in q]
        scales.append(int(F(s).view(np.uint32)))
        mins.append(int(F(m).view(np.uint32)))
    return {"codes": codes, "scale_bits": scales, "min_bits": mins}


def rows():
    rng = np.random.Generator(np.random.PCG64(20260101))
    gaussian = rng.standard_normal(D).astype(F)
    outlier = rng.standard_normal(D).astype(F)
    outlier[[17, 90]] = (40.0, -65.0)
    shifted = (0.05 * rng.standard_normal(D) + 7.5).astype(F)
    laplace = rng.laplace(0.0, 3.0, D).astype(F)
    return {"gaussian": bf16(gaussian), "outlier": bf16(outlier), "shifted": bf16(shifted),
            "laplace": bf16(laplace)}


def specs():
    out = []
    for meta in ("fp16", "bf16", "fp32"):
        out.append(dict(rule="minmax", bits=2, group=128, clip=0.0, meta=meta))
    for clip in (0.92, 0.96, 1.0):
        out.append(dict(rule="minmax", bits=2, group=128, clip=clip, meta="fp16"))
    for bits in (3, 4, 8):
        out.append(dict(rule="minmax", bits=bits, group=128, clip=0.0, meta="fp16"))
    for group in (32, 64):
        out.append(dict(rule="minmax", bits=2, group=group, clip=0.96, meta="fp16"))
    for bits in (2, 4):
        out.append(dict(rule="symmetric", bits=bits, group=128, clip=0.0, meta="fp16"))
    for rule in ("mse", "mse_unbiased"):
        for bits, group in ((2, 128), (2, 32), (3, 128), (4, 128)):
            out.append(dict(rule=rule, bits=bits, group=group, clip=0.0, meta="fp16"))
    for meta in ("fp16", "bf16", "fp32"):
        out.append(dict(rule="lloyd_max", bits=2, group=128, clip=0.96, meta=meta))
    for group, clip in ((128, 0.0), (64, 0.92), (32, 0.92)):
        out.append(dict(rule="lloyd_max", bits=2, group=group, clip=clip, meta="fp16"))
    return out


def main():
    cases = []
    table = rows()
    for name, words in table.items():
        for spec in specs():
            cases.append({"row": name, **spec, **quantise(widen(words), spec)})
    data = {"rows": {k: [int(w) for w in v] for k, v in table.items()}, "cases": cases}
    for case in data["cases"]:  # one hex digit pair a code keeps the file small
        case["codes"] = "".join(f"{c:02x}" for c in case["codes"])
    with open("tests/data/quant/row_goldens.json", "w", encoding="ascii") as f:
        f.write('{"rows": ' + json.dumps(data["rows"]) + ',\n"cases": [\n')
        f.write(",\n".join(json.dumps(c) for c in data["cases"]) + "\n]}\n")


if __name__ == "__main__":
    main()
