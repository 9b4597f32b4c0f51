"""1,000 generated schemas of growing difficulty, greedy and at temperature 1: every finished answer validates.
OSCAR_SOAK_SCHEMAS (1000) says how many."""
import os
import pathlib
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "server"))
from conftest import Server  # noqa: E402
from schemas import schemas  # noqa: E402
from test_structured import check_schemas  # noqa: E402

COUNT = int(os.environ.get("OSCAR_SOAK_SCHEMAS", "1000"))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_thousand_schemas(temperature):
    server = Server("--max-model-len", 2048, "--max-num-seqs", 16).ready()
    begun = time.monotonic()
    counts = check_schemas(server, schemas(COUNT), temperature, max_tokens=200, workers=12)
    print(f"temperature {temperature}: {counts} in {time.monotonic() - begun:.0f} s")
    assert counts["finished"] >= COUNT // 2, counts
    assert server.stop() == 0
