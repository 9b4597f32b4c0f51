#!/usr/bin/env python3
"""Writes tests/data/torch/*.pt with the real torch.save (made with Debian's python3-torch 1.13.1).

usage: tools/make_torch_fixtures.py OUTPUT_DIR

Every value follows from the code below, so src/io/torch_file_test.cc can state it independently.
"""
import sys
from collections import OrderedDict

import torch


def rotation_file(layers):
    return {"format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer", "layers": layers}


def main(out):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    torch.save(
        {
            "base": base,
            "again": base,
            "transposed": base.t(),
            "rows": base[1:3],
            "columns": base[:, 1::2],
            "element": base[2, 3],
            "expanded": base[:, :1].expand(4, 3),
            "empty": base[4:],
        },
        f"{out}/shared.pt",
    )

    values = [0, 1, 2, 3, 100]
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
              torch.int16, torch.int8, torch.uint8, torch.bool]
    torch.save({str(d).split(".")[1]: torch.tensor(values).to(d) for d in dtypes}, f"{out}/dtypes.pt")

    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6, dtype=torch.float32).reshape(2, 3))
        module.bias.fill_(-1)
    torch.save(module.state_dict(), f"{out}/state_dict.pt")

    torch.save(
        {
            "none": None, "true": True, "false": False, "int": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**40, -(2**40)],
            "float": 0.1, "text": "d\u00e9j\u00e0 vu", "tuple": (1, (2, 3), ()), "list": [[], [1]],
            "nested": OrderedDict([("z", 1), ("a", {5: "five", -7: "minus seven"})]),
        },
        f"{out}/values.pt",
    )
    torch.save(torch.tensor([5, 7, 11], dtype=torch.int32), f"{out}/bare_tensor.pt")

    # D = 256 in 2 kB: the exchange matrix is a Hankel matrix, all windows of one row of 511 numbers.
    row = torch.zeros(511)
    row[255] = 1
    exchange = row.as_strided((256, 256), (1, 1))
    torch.save(
        rotation_file({i: {"layer_id": i, "rotation": exchange, "eigenvalues": torch.arange(256.0)} for i in (0, 3, 7)}),
        f"{out}/rotation_gaps_d256.pt",
    )
    small = torch.eye(4)[[2, 0, 3, 1]]
    torch.save(
        rotation_file({str(i): {"layer_id": i, "rotation": small, "eigenvalues": torch.arange(4.0)} for i in range(2)}),
        f"{out}/rotation_str_keys.pt",
    )
    torch.save({"x": torch.arange(4.0)}, f"{out}/legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(1, 1), f"{out}/whole_module.pt")


if __name__ == "__main__":
    main(sys.argv[1])
