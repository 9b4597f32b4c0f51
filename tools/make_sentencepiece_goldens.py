#!/usr/bin/env python3
"""Writes tests/data/text/sentencepiece_goldens.json.xz: small tokenizers in the forms of Llama 2 and Mistral (BPE over
characters with byte fallback), trained here, and what Hugging Face `tokenizers` makes of some texts with them.

    python3 -m venv venv && venv/bin/pip install tokenizers
    venv/bin/python tools/make_sentencepiece_goldens.py
"""
import json
import lzma
import pathlib

import tokenizers
from tokenizers import AddedToken, Tokenizer, models, trainers

import text_golden_cases as cases

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARK = "\u2581"
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK},
                                              {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
DECODER = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}


FORMS = {
    "llama2": (PREPEND, None, DECODER),
    "no_prefix": (REPLACE, None, {**DECODER, "decoders": DECODER["decoders"][:3]}),
    "mistral_first": (None, metaspace("first", False), DECODER),
    "always": (None, metaspace("always", False), DECODER),
    "never_split": (None, metaspace("never", True), {**DECODER, "decoders": DECODER["decoders"][:3]}),
    "always_split": (None, metaspace("always", True), DECODER),
}
TEXTS = list(cases.SAMPLES)[:6] + [
    "", " ", "  ", "a", " a", "Hello, world!", "  two  spaces  ", "tab\tand\nnewline\r\n", "<s>", "<s>Hello", "a<s> b</s>c",
    "[INST] Hi [/INST] yes", "x[INST]y", "\u00e9t\u00e9 na\u00efve", "\u65e5\u672c\u8a9e", "\U0001f600 smile \U0001f468\u200d\U0001f469", "\u0000\u0001",
    "\u2581marked", "a\u2581b", "<0x0A>", "def f(x):\n    return x * 2\n", "1234567890 3.14", "e\u0301 combining", "the the the",
    " leading", "trailing ", "word" * 40,
]


def train():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    from tokenizers import normalizers
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=special, max_token_length=12, limit_alphabet=80, show_progress=False)
    words = [w for text in list(cases.SAMPLES)[:6] for w in text.split(" ")] + ["the", "return", "Hello", "world", "word"] * 9
    tokenizer.train_from_iterator(words * 3, trainer)
    made = json.loads(tokenizer.to_str())
    made["model"]["byte_fallback"] = True
    # Byte tokens are part of the vocabulary alone.
    made["added_tokens"] = [t for t in made["added_tokens"] if not t["content"].startswith("<0x")]
    return made


base = train()
out = {"made_with": f"tokenizers {tokenizers.__version__}", "model": base["model"], "forms": []}
size = len(base["model"]["vocab"])
base["added_tokens"].append({"id": size, "content": "[INST]", "special": False, "normalized": False, "single_word": False,
                             "lstrip": False, "rstrip": False})
for name, (normalizer, pre_tokenizer, decoder) in FORMS.items():
    for normalized in ([False, True] if name in ("llama2", "mistral_first") else [False]):
        file = json.loads(json.dumps(base))
        file["added_tokens"][-1]["normalized"] = normalized
        file.update(normalizer=normalizer, pre_tokenizer=pre_tokenizer, decoder=decoder, post_processor=None)
        tokenizer = Tokenizer.from_str(json.dumps(file))
        items = []
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            items.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                          "decoded_all": tokenizer.decode(ids, skip_special_tokens=False)})
        out["forms"].append({"name": name, "added_tokens": file["added_tokens"], "normalizer": normalizer,
                             "pre_tokenizer": pre_tokenizer, "decoder": decoder, "items": items})
packed = lzma.compress(json.dumps(out).encode(), preset=9 | lzma.PRESET_EXTREME)
(ROOT / "tests/data/text/sentencepiece_goldens.json.xz").write_bytes(packed)
print(len(packed), "bytes,", size, "tokens")
