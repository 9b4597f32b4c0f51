#!/usr/bin/env python3
"""Writes the goldens of src/text with the reference implementations.

    python3 -m venv venv && venv/bin/pip install tokenizers jinja2
    venv/bin/python tools/make_text_goldens.py

Token ids come from Hugging Face `tokenizers`; prompts from jinja2, set up as transformers sets it up
(ImmutableSandboxedEnvironment, trim_blocks, lstrip_blocks, loop controls, its own tojson). Inputs under
tests/data/text: qwen3_tokenizer.json.xz (Qwen3, Apache-2.0) and templates/*.jinja (the chat templates of
ten published models). The small GPT-2-style and Llama-3-style tokenizers are trained here, on the sample
text below and this repository's sources, and only when their files are absent (--retrain forces it).
"""
import argparse
import datetime
import json
import lzma
import pathlib
import random

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import text_golden_cases as cases

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/data/text"
CLOCK = datetime.datetime(2024, 7, 26, 10, 20, 30)
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def write_xz(name, text):
    packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    (DATA / name).write_bytes(packed)
    print(f"{name}: {len(text.encode())} bytes, {len(packed)} packed")


def read_xz(name):
    return lzma.decompress((DATA / name).read_bytes()).decode()


def corpus():
    texts = list(cases.SAMPLES) * 4
    for path in sorted((ROOT / "src/base").glob("*.cc")) + sorted((ROOT / "docs").glob("*.md")):
        texts.append(path.read_text())
    return texts


def train(kind):
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3_small"))
    byte_level = pre_tokenizers.ByteLevel
    if kind == "llama3_small":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            byte_level(add_prefix_space=False, use_regex=False)])
    else:
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=kind == "gpt2_prefix")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=1400, initial_alphabet=byte_level.alphabet(), show_progress=False))
    if kind == "llama3_small":
        tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                                      "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"])
        bos = tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                                          special_tokens=[("<|begin_of_text|>", bos)])])
    elif kind == "gpt2_small":
        tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=True)])
    else:
        # Every switch of an added token, with a normaliser that changes what some of them see.
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
        tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False),
                                      AddedToken("<mask>", lstrip=True, normalized=False),
                                      AddedToken("<sep>", rstrip=True, normalized=False),
                                      AddedToken("<both>", lstrip=True, rstrip=True, normalized=True)])
        tokenizer.add_tokens([AddedToken("cat", single_word=True, normalized=True),
                              AddedToken("caf\u0065\u0301", normalized=True),
                              AddedToken("catalogue", normalized=False),
                              AddedToken("    ", normalized=True), AddedToken("        ", normalized=True)])
    return tokenizer.to_str()


def tokenizer_goldens(retrain):
    out = {"tokenizers": tokenizers.__version__, "sets": []}
    sources = {"demo": (ROOT / "models/demo/tokenizer.json").read_text(), "qwen3": read_xz("qwen3_tokenizer.json.xz")}
    for kind in ("gpt2_small", "gpt2_prefix", "llama3_small"):
        name = kind + "_tokenizer.json.xz"
        if retrain or not (DATA / name).exists():
            text = train(kind)
            if kind == "gpt2_small":  # the older spelling of merges
                tree = json.loads(text)
                tree["model"]["merges"] = [" ".join(merge) for merge in tree["model"]["merges"]]
                text = json.dumps(tree, ensure_ascii=False)
            write_xz(name, text)
        sources[kind] = read_xz(name)
    for name, text in sources.items():
        tokenizer = Tokenizer.from_str(text)
        encoded = []
        for sample in cases.tokenizer_texts():
            tokenizer.encode_special_tokens = False
            trusted = tokenizer.encode(sample, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = True
            plain = tokenizer.encode(sample, add_special_tokens=False).ids
            entry = {"text": sample, "ids": trusted}
            # The reference reads added tokens through the byte alphabet, which breaks "café"; leave those out.
            decoded = tokenizer.decode(trusted, skip_special_tokens=True)
            if "\ufffd" in sample or "\ufffd" not in decoded:
                entry["decoded"] = decoded
            if plain != trusted:
                entry["plain_ids"] = plain
            encoded.append(entry)
        tokenizer.encode_special_tokens = False
        rng = random.Random(7)
        decoded = []
        for _ in range(20):
            ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(12)]
            decoded.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False),
                            "skipped": tokenizer.decode(ids, skip_special_tokens=True)})
        out["sets"].append({"tokenizer": name, "vocab_size": tokenizer.get_vocab_size(), "encode": encoded,
                            "decode": decoded, "with_special": tokenizer.encode("one two").ids})
    write_xz("tokenizer_goldens.json.xz", json.dumps(out, ensure_ascii=False, separators=(",", ":")))


def character_classes():
    """Which code points \\p{L}, \\p{N} and \\s hold for the reference's regular expressions, and its NFC, as ranges."""
    out = {}
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    for name in (r"\p{L}", r"\p{N}", r"\s"):
        split = pre_tokenizers.Split(Regex(name), behavior="removed")
        ranges = []
        for c in points:
            if split.pre_tokenize_str(chr(c)):
                continue
            if ranges and ranges[-1][1] == c - 1:
                ranges[-1][1] = c
            else:
                ranges.append([c, c])
        out[name] = ranges
    nfc = normalizers.NFC()
    out["nfc"] = {str(c): nfc.normalize_str(chr(c)) for c in points if nfc.normalize_str(chr(c)) != chr(c)}
    write_xz("character_goldens.json.xz", json.dumps(out, ensure_ascii=False, separators=(",", ":")))


class Generation(jinja2.ext.Extension):
    """transformers accepts {% generation %} around assistant text; rendering ignores it."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = CLOCK.strftime
    return env


def render(env, source, variables):
    try:
        return {"text": env.from_string(source).render(**variables)}
    except Exception as error:  # any failure of the reference is an expected failure
        return {"error": f"{type(error).__name__}: {error}"}


def template_goldens():
    env = environment()
    templates = {path.stem: path.read_text() for path in sorted((DATA / "templates").glob("*.jinja"))}
    templates["demo"] = json.loads((ROOT / "models/demo/tokenizer_config.json").read_text())["chat_template"]
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|endoftext|>"}
    chats = []
    for name, source in templates.items():
        for title, chat in cases.CHATS.items():
            variables = {"messages": chat["messages"], "tools": chat.get("tools"), "documents": None,
                         "add_generation_prompt": chat.get("add_generation_prompt", True), **special,
                         **chat.get("kwargs", {})}
            chats.append({"template": name, "chat": title, **render(env, source, variables)})
    snippets = [{"source": source, **render(env, source, cases.SNIPPET_VARIABLES)} for source in cases.SNIPPETS]
    out = {"jinja2": jinja2.__version__, "special": special, "inputs": cases.CHATS, "chats": chats,
           "variables": cases.SNIPPET_VARIABLES, "snippets": snippets}
    write_xz("template_goldens.json.xz", json.dumps(out, ensure_ascii=False, separators=(",", ":")))
    bad = [(c["template"], c["chat"], c["error"]) for c in chats if "error" in c]
    print(f"{len(chats)} chats ({len(bad)} fail in the reference), {len(snippets)} snippets "
          f"({sum('error' in s for s in snippets)} fail)")
    return bad, [s for s in snippets if "error" in s]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--retrain", action="store_true", help="train the small tokenizers again")
    parser.add_argument("--only", choices=["tokenizer", "template", "character"])
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.only in (None, "tokenizer"):
        tokenizer_goldens(options.retrain)
    if options.only in (None, "character"):
        character_classes()
    if options.only in (None, "template"):
        bad, snippets = template_goldens()
        if options.verbose:
            for item in bad:
                print(item)
            for item in snippets:
                print(item["source"], "->", item["error"])


if __name__ == "__main__":
    main()
