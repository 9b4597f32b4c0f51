"""Whatever a grammar lets through is an answer of its form: random bytes along the masks, where a model would mostly write
what it is used to. Schemas of two generators and one list, regular expressions, grammars.

OSCAR_WALKED_SCHEMAS (1000) says how many schemas of each generator."""
import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import jsonschema
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/server"))
from schemas import schemas, validate  # noqa: E402

WALKER = os.environ.get("OSCAR_SCHEMA_WALKER", str(ROOT / "build/release/tests/schema_walker"))
COUNT = int(os.environ.get("OSCAR_WALKED_SCHEMAS", "1000"))
SCHEMA, REGEX, GRAMMAR = 1, 2, 4


def walk(kind, texts, walks, steps=3000):
    """(index, kind, text) of every walk; text is bytes where it is an answer."""
    lines = "".join(json.dumps({"kind": kind, "text": text}) + "\n" for text in texts)
    run = subprocess.run([WALKER, str(walks), str(steps)], input=lines, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    if "built without xgrammar" in run.stdout:
        pytest.skip("built without xgrammar")
    results = [json.loads(line) for line in run.stdout.splitlines()]
    return [(r["line"], r["kind"], bytes.fromhex(r["text"]) if r["kind"] == "done" else r["text"]) for r in results]


def check(cases, walks):
    """Every answer is strict JSON and validates; how many there were of each kind."""
    counts = collections.Counter()
    for index, kind, text in walk(SCHEMA, [json.dumps(case) for case in cases], walks):
        counts[kind] += 1
        shown = f"{json.dumps(cases[index], ensure_ascii=False)}\n{text!r}"
        assert kind != "stuck", shown
        if kind != "done":
            continue
        try:
            value = json.loads(text.decode("utf-8"))
            validate(value, cases[index])
        except (ValueError, jsonschema.ValidationError) as problem:
            raise AssertionError(f"{shown}\n{problem}") from problem
    return counts


def test_generated_schemas():
    counts = check([schema for _, schema in schemas(COUNT, seed=77)], walks=4)
    print(counts)
    assert counts["refused"] == 0 and counts["done"] >= 3 * COUNT, counts


class Wild:
    """Names, numbers and patterns that are made to be difficult."""
    NAMES = ["a", "b c", "é", '"q"', "x\\y", "long_name_here", "0", "", "tab\tname", "日本"]
    PATTERNS = ["^[a-z]+$", "^.{1,5}$", "[0-9]{2}", "^(a|bc)*$", "é+", "^[^x]$", r"^\w+\.\w{2,3}$", r"^[\u00e0-\u00ff]{2}$", "^$",
                "a?b", "^A(-[0-9]{1,3})?$", "^(ab+)?c$", "^[]a]?$"]
    VALUES = [1, 2.5, "a", "b\n", None, True, [1], {"k": "v"}, 'é"', -0.5, 10**20, "", 1e-7]

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.definitions = {}

    def schema(self, depth):
        schema = self.object(depth) if self.random.random() < 0.75 else self.value(depth)
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def value(self, depth):
        r = self.random
        number = r.choice([-2.5, 0, 1e-3, 7, 1e6])
        low = r.choice([-10**6, -7, 0, 1, 3, 999])
        kinds = [
            lambda: {"type": r.choice(["null", "boolean", "integer", "number", "string"])},
            lambda: {"type": "string", "minLength": r.randint(0, 5), "maxLength": r.randint(5, 130)},
            lambda: {"type": "integer", "minimum": low, "maximum": low + r.choice([0, 1, 9, 100, 10**9])},
            lambda: {"type": "number", r.choice(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]): number},
            lambda: {"type": "string", "pattern": r.choice(self.PATTERNS)},
            lambda: {"enum": r.sample(self.VALUES, k=r.randint(1, 4))},
            lambda: {"type": r.sample(["null", "boolean", "integer", "string", "number"], k=2)},
            lambda: {"const": r.choice(self.VALUES)},
            lambda: r.choice([{"minLength": 3}, {"minimum": 3}, {"required": ["a"]}]),
        ]
        if depth > 0:
            kinds += [lambda: {"type": "array", "items": self.value(depth - 1), "minItems": r.randint(0, 2), "maxItems": r.randint(2, 4)},
                      lambda: {"type": "array", "prefixItems": [self.value(depth - 1)], "items": r.choice([False, self.value(depth - 1)])},
                      lambda: {"anyOf": [self.value(depth - 1) for _ in range(r.randint(1, 3))]},
                      lambda: self.reference(depth), lambda: self.object(depth - 1), lambda: self.object(depth - 1)]
        return r.choice(kinds)()

    def reference(self, depth):
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.value(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def object(self, depth):
        r = self.random
        names = r.sample(self.NAMES, k=r.randint(0, 4))
        required = [name for name in names if r.random() < 0.5] + (["extra"] if r.random() < 0.15 else [])
        schema = {"properties": {name: self.value(depth) for name in names}, "required": required}
        if r.random() < 0.9:
            schema["type"] = "object"
        choice = r.random()
        if choice < 0.4 and "extra" not in required:
            schema["additionalProperties"] = False
        elif choice < 0.7:
            schema["additionalProperties"] = self.value(0) if choice < 0.6 else True
        if r.random() < 0.15:
            schema["maxProperties"] = max(len(required), r.randint(1, 6))
        return schema


def test_wild_schemas():
    cases = [Wild(seed).schema(1 + 4 * seed // COUNT) for seed in range(COUNT)]
    counts = check(cases, walks=4)
    print(counts)
    assert counts["done"] >= 3 * COUNT and counts["refused"] <= COUNT // 50, counts


FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uuid",
           "json-pointer", "relative-json-pointer", "idn-email", "idn-hostname", "iri", "iri-reference", "regex", "color"]
LISTED = [{"type": "string", "format": name} for name in FORMATS] + [
    {"type": "string", "minLength": 121, "maxLength": 130}, {"type": "object", "additionalProperties": {"type": "null"}}, {},
    {"type": "object", "patternProperties": {"^x_?[a-z]{1,3}$": {"type": "null"}}, "additionalProperties": False},
    {"type": "array", "items": False}, {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 2},
    {"type": ["string", "integer"], "minimum": 3, "minLength": 2}, {"const": "a\u0001\n\t\"\\é"}, {"type": "integer", "minimum": 10**18},
    {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "additionalProperties": False},
]


def test_listed_schemas():
    counts = check(LISTED, walks=40)
    assert counts["refused"] == 0 and counts["done"] >= 30 * len(LISTED), counts


REGEXES = ["[A-Z][a-z]+(-[0-9]{1,3})?", "(ab{1,2})?c", "(ab+)?", "x(-y{1,2})?z", "(a{2,})?b", "[^a]{2,4}", r"\w+@\w+\.(com|org)", "(a|b)*c",
           "é{1,3}日本?", r"\d{4}-\d{2}-\d{2}", ".{3}", r"[\u0000-\U0010ffff]{2}", r"\S+", "(?:ab)+", "[-+*]?[0-9]+"]


def test_regular_expressions():
    answers = walk(REGEX, REGEXES, walks=40, steps=400)
    counts = collections.Counter(kind for _, kind, _ in answers)
    for index, kind, text in answers:
        assert kind in ("done", "cut"), (REGEXES[index], text)
        if kind == "done":
            assert re.fullmatch(REGEXES[index], text.decode("utf-8"), re.ASCII | re.DOTALL), (REGEXES[index], text)
    assert counts["done"] >= 30 * len(REGEXES), counts


GRAMMARS = {
    'root ::= item ("," item)* "."\nitem ::= [0-9]{1,3} | "x" [^0-9,.]+': r"(\d{1,3}|x[^0-9,.]+)(,(\d{1,3}|x[^0-9,.]+))*\.",
    'root ::= "é" [一-龠]? | ("a" "b"?)+ # either': r"é[一-龠]?|(ab?)+",
    'root ::= s\ns ::= "(" s ")" | ""': r"(\(*)(\)*)",
}


def test_grammars():
    for (index, kind, text), patterns in ((answer, list(GRAMMARS.values())) for answer in walk(GRAMMAR, list(GRAMMARS), walks=60, steps=400)):
        assert kind in ("done", "cut"), text
        if kind == "done":
            assert re.fullmatch(patterns[index], text.decode("utf-8")), (index, text)
            assert text.count(b"(") == text.count(b")")
