"""The real binary, run as a user would. OSCAR_BIN names it; ctest sets it."""
import json
import os
import re
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRESS = re.compile(r" of .*/s, .* (left|s)$")


class Oscar:
    def __init__(self, binary):
        self.binary = binary

    def __call__(self, *args, stdin=None, ok=True, env=None):
        """Runs a command; with ok=True it must succeed, with None it may, else it must fail with one line of error."""
        run = subprocess.run(
            [self.binary, *map(str, args)], input=stdin, capture_output=True, timeout=600,
            text=not isinstance(stdin, bytes), env={**os.environ, **(env or {})},
        )
        if ok:
            assert run.returncode == 0, f"{args}: {run.stderr}"
        elif ok is not None or run.returncode != 0:
            assert run.returncode != 0, f"{args} succeeded: {run.stdout}"
            # Progress may come before it where the machine is slow; the error itself is the last line.
            stderr = run.stderr if isinstance(run.stderr, str) else run.stderr.decode()
            lines = [line for line in stderr.strip().splitlines() if not PROGRESS.search(line)]
            assert len(lines) <= 2 and stderr.strip().splitlines()[-1] == lines[-1], stderr
        return run

    def json(self, *args, **kwargs):
        return json.loads(self(*args, **kwargs).stdout)


@pytest.fixture(scope="session")
def oscar():
    return Oscar(os.environ.get("OSCAR_BIN", str(ROOT / "build/release/oscar")))


@pytest.fixture(scope="session")
def root():
    return ROOT
