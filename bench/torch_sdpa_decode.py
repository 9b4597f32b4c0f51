#!/usr/bin/env python3
"""BF16 decode attention through PyTorch (cuDNN, Flash) on the shapes of oscar_bench_cuda.

Prints one line a shape and backend; says so and exits 0 where torch or a GPU is missing.
"""
import statistics
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    print("torch_sdpa_decode: torch is not installed, skipped")
    sys.exit(0)
if not torch.cuda.is_available():
    print("torch_sdpa_decode: no CUDA device, skipped")
    sys.exit(0)

Q_HEADS, KV_HEADS, DIM = 32, 8, 128


def measure(call, copies, iterations=20):
    times = []
    for i in range(iterations + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(i % copies)
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


for batch, context in [(1, 100_000), (8, 100_000), (32, 30_000), (128, 8192)]:
    size = 2 * batch * KV_HEADS * context * DIM * 2
    copies = max(1, int(400e6 / size) + 1)
    make = lambda heads, tokens: torch.randn(batch, heads, tokens, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = ([make(KV_HEADS, context) for _ in range(copies)] for _ in range(2))
    q = make(Q_HEADS, 1)
    for name, backend in [("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]:
        try:
            with sdpa_kernel(backend):
                us = measure(
                    lambda i: torch.nn.functional.scaled_dot_product_attention(q, k[i], v[i], enable_gqa=True), copies
                )
            print(f"bf16 {name:5s} batch {batch:3d} x {context:6d}: {us:8.1f} us {size / us * 1e-6:5.2f} TB/s")
        except RuntimeError as error:
            print(f"bf16 {name:5s} batch {batch:3d} x {context:6d}: {str(error).splitlines()[0][:90]}")
    del k, v
    torch.cuda.empty_cache()
