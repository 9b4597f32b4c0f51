#!/usr/bin/env python3
"""Writes tests/data/pages: golden cache pages, computed from docs/cache-format.md and the rules of
src/quant/row_quantizer.h by an implementation that shares no code with the project (numpy, float32).

  python3 tools/make_page_goldens.py tests/data/pages

Keys that are not rows (groups along tokens, codebooks) have files and a function of their own, form_page; V there is 2 bits, min/max.

Rows are sums of four hashed integers over 64, exactly representable in BF16 and roughly Gaussian.
K uses oscar+ (MSE fit, unbiased), V the quantile clip at 0.92.
"""
import os
import sys

import numpy as np

F = np.float32
TOKENS = 64


def hashed(i):
    x = (i * 2654435761 + 12345) & 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def rows(dim, which):
    out = np.zeros((TOKENS, dim), dtype=F)
    for t in range(TOKENS):
        for d in range(dim):
            h = hashed((which * TOKENS + t) * dim + d)
            out[t, d] = F(sum(((h >> (8 * k)) & 0x7F) - 63 for k in range(4))) / F(64)
    return out


def sum16(x):
    lanes = x[:16].astype(F).copy()
    for i in range(16, len(x), 16):
        lanes = (lanes + x[i : i + 16]).astype(F)
    width = 8
    while width:
        lanes[:width] = lanes[:width] + lanes[width : 2 * width]
        width //= 2
    return lanes[0]


def fp16(x):
    return np.float16(np.clip(x, -65504, 65504))


def quantise_minmax(x, bits):
    top = F(2**bits - 1)
    scale = max(fp16(max(x.max() - x.min(), F(1e-8)) / top), np.float16(2.0**-24))
    low = fp16(x.min())
    codes = np.clip(np.floor((x - F(low)) / F(scale) + F(0.5)), 0, top)
    return codes.astype(np.uint32), scale, low


def quantise_oscar_plus(x, bits):
    n = F(len(x))
    mean = F(sum16(x) / n)
    centred = (x - mean).astype(F)
    sxx = sum16((centred * centred).astype(F))
    deviation = np.sqrt(F(sxx / n))
    half = 2 ** (bits - 1)
    shrink = {2: F(1), 3: F(0.5884), 4: F(0.3365)}[bits]
    best = None
    for factor in (0.75, 0.85, 0.95, 1.05, 1.15):
        step = F(F(F(factor) * shrink) * deviation)
        if not step > 0:
            break
        if bits == 2:
            q = (centred >= -step).astype(int) + (centred >= 0) + (centred >= step)
        else:
            q = np.clip(np.floor((centred / step).astype(F)), -half, half - 1).astype(int) + half
        total, squares = int(q.sum()), int((q * q).sum())
        spread = len(x) * squares - total * total
        if spread == 0:
            continue
        variance = F(F(spread) / n)
        sqx = sum16((q.astype(F) * centred).astype(F))
        score = F(F(sqx * sqx) / variance)
        if best is None or score > best[0]:
            best = (score, F(sqx / variance), sqx, total, q)
    _, slope, sqx, total, q = best
    slope = F(slope * np.clip(F(sxx / F(slope * sqx)), F(0.5), F(2)))
    scale = max(fp16(slope), np.float16(2.0**-24))
    low = fp16(F(mean - F(F(scale) * F(F(total) / n))))
    return q.astype(np.uint32), scale, low


def code_position(kind_bits, order, dim, is_k, t, d):
    """(word index inside the K or V codes, shift), from the document."""
    if order == "tc":
        sub = min(dim, 128)
        steps, per = sub // 16, 16 // kind_bits
        r, c = (t % 16, d % 16) if is_k else (d % 16, t % 16)
        lane = (r % 8) * 4 + (c % 8) // 2
        word = (r // 8) * 2 + c // 8 if is_k else r // 8 + (c // 8) * 2
        step = (t // 16) * steps + (d % sub) // 16
        base = (d // sub) * (TOKENS * sub * kind_bits // 32)
        return base + (step // per) * 128 + lane * 4 + word, (step % per) * kind_bits + 16 * (c & 1)
    per = 16 // kind_bits
    if is_k:
        pair, lane, odd = (t // 16) * (dim // 2) + d // 2, t % 16, d & 1
    else:
        pair, lane, odd = (d // 16) * (TOKENS // 2) + t // 2, d % 16, t & 1
    shift = (pair // 8 % 2) * 4 + (pair // 4 % 2) * 8 + pair % 4 if kind_bits == 1 else (pair % per) * kind_bits
    return (pair // per) * 16 + lane, shift + 16 * odd


def parts(bits):
    """(bits, how far a code is moved right) of each part of a side's codes: 3 bits are two parts."""
    return [(2, 0), (1, 2)] if bits == 3 else [(bits, 0)]


def page(bits, order, dim, group, v_bits=None):
    sides = [rows(dim, 0), rows(dim, 1)]
    if bits == 16:
        if order == "cpu":
            return b"".join((side.view(np.uint32) >> 16).astype(np.uint16).tobytes() for side in sides)
        block = np.zeros((2, dim // 64, TOKENS, 64), dtype=np.uint16)  # planes of 64 dims
        for s, side in enumerate(sides):
            raw = (side.view(np.uint32) >> 16).astype(np.uint16)
            for t in range(TOKENS):
                for c in range(dim // 8):
                    to = (c % 8) ^ (t & 7)
                    block[s, c // 8, t, to * 8 : to * 8 + 8] = raw[t, c * 8 : c * 8 + 8]
        return block.tobytes()
    groups = dim // group
    side_bits = [bits, v_bits or bits]
    words = [[np.zeros(TOKENS * dim * part // 32, dtype=np.uint32) for part, _ in parts(b)] for b in side_bits]
    meta = [np.zeros((groups, TOKENS, 2), dtype=np.float16) for _ in range(2)]
    for s, side in enumerate(sides):
        for t in range(TOKENS):
            x = side[t].copy()
            if s == 1:
                limit = np.sort(np.abs(x))[min(int(np.floor(np.float64(F(0.92)) * dim)), dim - 1)]
                x = np.clip(x, -limit, limit)
            for g in range(groups):
                part = x[g * group : (g + 1) * group]
                q, scale, low = (quantise_oscar_plus if s == 0 else quantise_minmax)(part, side_bits[s])
                meta[s][g, t] = (scale, low)
                for i, code in enumerate(q):
                    for target, (width, down) in zip(words[s], parts(side_bits[s])):
                        w, shift = code_position(width, order, dim, s == 0, t, g * group + i)
                        target[w] |= np.uint32((int(code) >> down & (2**width - 1)) << shift)
    out = b"".join(part.tobytes() for side in words for part in side)
    for s in range(2):
        for g in range(groups):
            if order == "tc":
                plane = np.zeros((8, 8, 2), dtype=np.float16)
                for t in range(TOKENS):
                    plane[t % 8, t // 8] = meta[s][g, t]
            else:
                plane = meta[s][g].T
            out += np.ascontiguousarray(plane).tobytes()
    return out


def store(words, width, order, dim, is_k, t, d, code):
    w, shift = code_position(width, order, dim, is_k, t, d)
    words[w] |= np.uint32(code << shift)


def store_code(parts_of_side, bits, order, dim, is_k, t, d, code):
    for target, (width, down) in zip(parts_of_side, parts(bits)):
        store(target, width, order, dim, is_k, t, d, int(code) >> down & (2**width - 1))


def quantise_affine(x, bits, rule):
    """quant/affine_group.h: codes, scale, min of one group."""
    top = F(2**bits - 1)
    lo, hi = F(x.min()) + F(0), F(x.max()) + F(0)
    if rule == "integer":
        step = F(F(hi - lo) / top)
        zero = np.rint(F(-lo / step))
        codes = np.clip(np.rint((x * F(top / F(hi - lo))).astype(F) + zero), 0, top)
        return codes.astype(np.uint32), fp16(step), fp16(F(-zero * step))
    if rule == "floor":
        return quantise_minmax(x, bits)
    scale = max(fp16(F(F(hi - lo) / top)), np.float16(2.0**-24))
    low = fp16(lo)
    codes = np.rint(np.clip(((x - F(low)).astype(F) / F(scale)).astype(F), 0, top))
    return codes.astype(np.uint32), scale, low


LEVELS = {2: [38, 127], 3: [14, 45, 79, 127], 4: [6, 18, 31, 44, 58, 75, 96, 127]}
UNITS = {2: 84.08267, 3: 59.01503, 4: 46.47586}
# Lloyd-Max thresholds of N(0, 1): 0 and the positive ones, to six digits.
THRESHOLDS = {2: [0, 0.981599], 3: [0, 0.500550, 1.049988, 1.747928]}


def form_page(form, bits, rule, norm, group, order, dim, v_group):
    """Blocks of one head, as many as are sealed together, joined. V is 2 bits, min/max."""
    pages = 2 if group == 128 else 1
    k = np.concatenate([rows(dim, 2 * p) for p in range(pages)])
    values = [rows(dim, 2 * p + 1) for p in range(pages)]
    boosted = dim // 8 if form == "mixed" else 0
    words = [[np.zeros(TOKENS * dim * part // 32, dtype=np.uint32) for part, _ in parts(bits)] for _ in range(pages)]
    boost = [np.zeros((boosted, TOKENS // 4), dtype=np.uint8) for _ in range(pages)]
    k_meta = [b""] * pages
    norms = [b""] * pages
    if form == "codebook":
        root = np.sqrt(F(dim))
        for t in range(TOKENS):
            n = np.sqrt(sum16((k[t] * k[t]).astype(F)))
            u = ((k[t] / F(n + F(1e-8))).astype(F) * root).astype(F)
            codes = sum((u > F(x)).astype(int) for x in THRESHOLDS[bits] + [-x for x in THRESHOLDS[bits][1:]])
            level = np.array([-x for x in LEVELS[bits][::-1]] + LEVELS[bits])[codes]
            fit = F(F(n * F(F(UNITS[bits]) * root)) / np.sqrt(F((level * level).sum())))
            k_meta[0] += fp16(fit).tobytes()
            for d in range(dim):
                store_code(words[0], bits, order, dim, True, t, d, codes[d])
    else:
        if norm:
            for t in range(len(k)):
                n = np.sqrt(sum16((k[t] * k[t]).astype(F)))
                norms[t // TOKENS] += n.tobytes()
                k[t] = (k[t] / n).astype(F)
        index = [255] * dim
        if boosted:
            sums = np.zeros(dim, dtype=F)
            for t in range(len(k)):
                sums = (sums + np.abs(k[t])).astype(F)
            largest = sorted(np.argsort(-sums, kind="stable")[:boosted])
            for i, d in enumerate(largest):
                index[d] = i
        half = dim // pages
        width = min(group, TOKENS * pages)
        for first in range(0, len(k), width):
            pairs = []
            for d in range(dim):
                q, scale, low = quantise_affine(k[first : first + width, d], 4 if index[d] < 255 else bits, rule)
                pairs.append((scale, low))
                for i, code in enumerate(q):
                    page, t = divmod(first + i, TOKENS)
                    store_code(words[page], bits, order, dim, True, t, d, int(code) & (2**bits - 1))
                    if index[d] < 255:
                        boost[page][index[d], t // 4] |= np.uint8(int(code) >> 2 << t % 4 * 2)
            for page in range(pages) if pages > 1 else [first // TOKENS]:
                mine = np.array(pairs[page * half : (page + 1) * half] if pages > 1 else pairs, dtype=np.float16)
                k_meta[page] += np.ascontiguousarray(mine if order == "tc" else mine.T).tobytes()
        if boosted:
            for page in range(pages):
                k_meta[page] += bytes(index[page * half : (page + 1) * half])
    out = b""
    for page in range(pages):
        v_words = np.zeros(TOKENS * dim * 2 // 32, dtype=np.uint32)
        v_meta = b""
        for g in range(dim // v_group):
            plane = np.zeros((TOKENS, 2), dtype=np.float16)
            for t in range(TOKENS):
                q, scale, low = quantise_minmax(values[page][t, g * v_group : (g + 1) * v_group], 2)
                plane[t] = (scale, low)
                for i, code in enumerate(q):
                    store(v_words, 2, order, dim, False, t, g * v_group + i, int(code))
            if order == "tc":
                plane = plane.reshape(8, 8, 2).transpose(1, 0, 2)
            else:
                plane = plane.T
            v_meta += np.ascontiguousarray(plane).tobytes()
        out += b"".join(part.tobytes() for part in words[page]) + boost[page].tobytes() + v_words.tobytes()
        out += k_meta[page] + norms[page] + v_meta
    return out


def main():
    directory = sys.argv[1]
    os.makedirs(directory, exist_ok=True)
    for bits, order, dim, group, *v_bits in [
        (2, "tc", 128, 128), (2, "cpu", 128, 128), (2, "tc", 64, 32), (2, "cpu", 64, 64), (2, "tc", 256, 256),
        (2, "cpu", 256, 128), (4, "tc", 128, 64), (4, "cpu", 128, 128), (16, "tc", 64, 64), (16, "cpu", 64, 64), (16, "tc", 128, 128),
        (3, "tc", 128, 128), (3, "cpu", 128, 128), (3, "cpu", 64, 32), (3, "tc", 256, 128), (4, "cpu", 128, 128, 2), (3, "tc", 64, 64, 2),
        (2, "cpu", 256, 256, 3),
    ]:
        name = f"b{bits}" + "".join(f"v{b}" for b in v_bits)
        with open(f"{directory}/{name}_{order}_d{dim}_g{group}.bin", "wb") as f:
            f.write(page(bits, order, dim, group, *v_bits))
    for name, *form in [
        ("channels", 2, "real", False, 32, "cpu", 64, 32), ("channels", 2, "integer", True, 32, "tc", 64, 32),
        ("channels", 3, "integer", False, 64, "cpu", 64, 64), ("channels", 2, "real", False, 128, "cpu", 64, 64),
        ("channels", 4, "integer", True, 128, "tc", 64, 64), ("mixed", 2, "floor", False, 128, "cpu", 64, 64),
        ("codebook", 3, "", False, 0, "cpu", 64, 64), ("codebook", 2, "", False, 0, "tc", 128, 128),
    ]:
        bits, _, norm, group, order, dim, _ = form
        with open(f"{directory}/{name}{group or ''}{'_norm' if norm else ''}_b{bits}_{order}_d{dim}.bin", "wb") as f:
            f.write(form_page(name, *form))


main()
