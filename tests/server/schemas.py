"""JSON schemas of growing difficulty, the same ones for the same seed."""
import datetime
import random

import jsonschema

PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][a-z]+(-[0-9]{1,3})?$", "^(red|green|blue)$", r"^\d{3}-\d{4}$", "^#[0-9a-f]{6}$",
            r'^[^"\\\x00-\x1f]{1,8}$']
FORMATS = ["date", "date-time", "time", "uuid", "ipv4", "ipv6", "email", "idn-email", "hostname", "duration"]
# Formats are notes to this validator, too, unless it is told to look at them.
CHECKER = jsonschema.FormatChecker(["date", "email", "idn-email", "ipv4", "ipv6", "uuid"])


@CHECKER.checks("date-time", ValueError)
def is_date_time(value):
    return not isinstance(value, str) or datetime.datetime.fromisoformat(value) is not None


@CHECKER.checks("time", ValueError)
def is_time(value):
    return not isinstance(value, str) or datetime.time.fromisoformat(value) is not None


def validate(value, schema):
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(value)


WORDS = ["name", "age", "city", "tags", "owner", "id", "é", "a b", "x\"y", "価格", "items", "kind", "note\n", "path/to"]


class Generator:
    """`level` 0 is a single value; every level adds kinds of schemas, and depth."""

    def __init__(self, seed, level):
        self.random = random.Random(seed)
        self.level = level
        self.definitions = {}

    def schema(self):
        root = self.object(self.depth()) if self.level >= 2 else self.leaf()
        if self.definitions:
            root = {**root, "$defs": self.definitions}
        return root

    def depth(self):
        return min(1 + self.level // 2, 5)

    def value(self, depth):
        kinds = [self.leaf, self.leaf]
        if depth > 0:
            kinds += [lambda: self.array(depth - 1), lambda: self.object(depth - 1)]
            if self.level >= 4:
                kinds += [lambda: self.any_of(depth - 1)]
            if self.level >= 6:
                kinds += [lambda: self.reference(depth - 1), lambda: self.tuple(depth - 1)]
        return self.random.choice(kinds)()

    def leaf(self):
        pick = self.random.choice
        kinds = [
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
            lambda: {"type": "integer"},
            lambda: {"type": "string"},
            lambda: {"enum": self.random.sample(["red", "green", 3, 4.5, None, True, "a\"b", "日本"], k=3)},
        ]
        if self.level >= 1:
            low = self.random.randint(-2000, 2000)
            kinds += [
                lambda: {"type": "integer", "minimum": low, "maximum": low + self.random.randint(0, 5000)},
                lambda: {"type": "integer", "exclusiveMinimum": low},
                lambda: {"type": "number", "minimum": low, "maximum": low + 10},
                lambda: {"const": pick(["fixed", 17, False, None, {"a": [1, "b"]}, []])},
                lambda: {"type": "string", "minLength": self.random.randint(0, 3),
                         "maxLength": self.random.randint(3, 20)},
            ]
        if self.level >= 3:
            kinds += [
                lambda: {"type": "string", "pattern": pick(PATTERNS)},
                lambda: {"type": "string", "format": pick(FORMATS)},
                lambda: {"type": ["integer", "null"]},
                lambda: {"type": ["string", "boolean"]},
                lambda: {"type": "string", "enum": [str(i) * (1 + i % 3) for i in range(self.random.randint(1, 40))]},
            ]
        return pick(kinds)()

    def array(self, depth):
        low = self.random.randint(0, 2)
        schema = {"type": "array", "items": self.value(depth), "minItems": low, "maxItems": low + self.random.randint(0, 3)}
        if self.random.random() < 0.2:
            del schema["minItems"]
        return schema

    def tuple(self, depth):
        return {"type": "array", "prefixItems": [self.value(depth) for _ in range(self.random.randint(1, 3))],
                "items": False}

    def object(self, depth):
        names = self.random.sample(WORDS, k=self.random.randint(0 if depth < 2 else 1, min(2 + self.level, 6)))
        schema = {"type": "object", "properties": {name: self.value(depth) for name in names}}
        schema["required"] = [name for name in names if self.random.random() < 0.7]
        choice = self.random.random()
        if choice < 0.5:
            schema["additionalProperties"] = False
        elif choice < 0.6 and self.level >= 5:
            schema["additionalProperties"] = {"type": "integer"}
            schema["maxProperties"] = len(names) + 2
        return schema

    def any_of(self, depth):
        return {"anyOf": [self.value(depth) for _ in range(self.random.randint(1, 3))]}

    def reference(self, depth):
        name = f"d{len(self.definitions)}"
        if self.level >= 8 and self.random.random() < 0.5:  # a list that ends, or does not
            self.definitions[name] = {
                "type": "object",
                "properties": {"value": self.leaf(), "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}},
                "required": ["value", "next"], "additionalProperties": False}
        else:
            self.definitions[name] = {}  # its place, for those inside
            self.definitions[name] = self.value(depth)
        return {"$ref": f"#/$defs/{name}"}


def schemas(count, seed=28):
    """(level, schema) pairs, from level 0 to level 9."""
    for i in range(count):
        level = i * 10 // count
        yield level, Generator(seed * 100003 + i, level).schema()
