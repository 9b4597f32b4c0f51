"""Searches README, docs, --help and headers for wording that CONTRIBUTING.md's glossary forbids."""
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("OSCAR_BIN", ROOT / "build/release/oscar")).resolve()

# What can come "per": a unit, then what it is counted by. "One layer" or "a page of a layer" is fine; "one a layer" is not.
UNITS = (r"(?:bits?|bytes|tokens|items|numbers|rows|codes|scales?|pages|files|tasks|threads?|warps|lanes|words|cycles|launches|copies"
         r"|calls|samples|sequences|values|[GMK]i?B|us|ms|ns|one|two|three|four|eight|matrix|matrices|(?<![0-9.])[0-9]+)")
PER = (r"(?:number|head|KV head|query head|layer|token|task|step|page|row|line|key|code|sequence|stream|request|core|thread|group|block"
       r"|output|method|file|second|element|warp|lane|tile|slot|side|model|case|item|process|conversation|channel|connection)")
FORBIDDEN = {
    "sample, or plot": r"\bdraw(?:n|s|ing|ings)?\b",
    # A product of two numbers, or of dimensions, is one.
    "GEMM": r"\bmatrix products?\b|\bproducts? (?:of (?:weights|a pass|a matrix|one row|linear|few rows)|take|by cuBLAS)",
    "bandwidth": r"\broofs?\b",
    "per": rf"\b{UNITS} (?-i:an?) {PER}\b(?! of)",
    "cost, gain, result": r"\bworth\b",
    "diverge": r"\bparted\b",
    "continue": r"\bgo(?:es)? on\b",
    "separate, its own": r"\bof (?:its|their) own\b",
    "alternating": r"\bby turns\b",
    "non-finite": r"\bare not numbers\b|\bwhose (?:they are|it is)\b",
}
# The glossary itself shows the forms.
DOCUMENTS = ["README.md", "SECURITY.md", "models/demo/README.md", *sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
HEADERS = sorted(str(path.relative_to(ROOT)) for folder in ("src", "include") for suffix in ("*.h", "*.cuh")
                 for path in (ROOT / folder).rglob(suffix))


def findings(name, text):
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for better, pattern in FORBIDDEN.items():
            for match in re.finditer(pattern, line, re.I):
                found.append(f"{name}:{number}: '{match.group(0)}': say {better}: {line.strip()[:120]}")
    return found


def test_the_patterns_find_what_they_forbid():
    for text in ("one a KV head", "how to draw a token", "the roof of memory", "bits a number", "products of linear layers", "a matrix product",
                 "what it is worth", "logits that are not numbers", "pages of their own", "goes on from there"):
        assert findings("x", text), text
    for text in ("one page of a layer", "a dot product", "one per KV head", "withdrawn", "the worst case", "a product of two scales", "go once"):
        assert not findings("x", text), text


@pytest.mark.parametrize("names", [DOCUMENTS, HEADERS], ids=["documents", "headers"])
def test_texts(names):
    assert len(names) > 10
    found = [line for name in names for line in findings(name, (ROOT / name).read_text())]
    assert not found, "\n".join(found)


def test_help():
    text = subprocess.run([BINARY, "man"], capture_output=True, text=True, check=True).stdout
    assert "calibrate" in text
    found = findings("oscar man", text)
    assert not found, "\n".join(found)
