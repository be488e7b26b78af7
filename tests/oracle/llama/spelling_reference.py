"""Saves tokenizers that were trained on a text, and its tokens. Usage: spelling_reference.py RESULT. Saves None if there is no tokenizers."""

import sys

import torch

TEXT = "Grüße an die Welt,\n\t once upon a time 東京 🦊 \x01 there was a fox; there was a time. " * 3


def over_bytes(library):
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer, library.trainers.BpeTrainer(vocab_size=320, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet())


def over_characters(library):
    tokenizer = library.Tokenizer(library.models.BPE(byte_fallback=True))
    tokenizer.normalizer = library.normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = library.decoders.Sequence(
        [library.decoders.Replace("\u2581", " "), library.decoders.ByteFallback(), library.decoders.Fuse()])
    # Letters only: what is none of them falls back on bytes.
    return tokenizer, library.trainers.BpeTrainer(
        vocab_size=320, limit_alphabet=30, special_tokens=[f"<0x{byte:02X}>" for byte in range(256)])


def main():
    try:
        import tokenizers
    except ImportError:
        torch.save(None, sys.argv[1])
        return
    cases = {}
    for name, make in {"bytes": over_bytes, "characters": over_characters}.items():
        tokenizer, trainer = make(tokenizers)
        tokenizer.train_from_iterator([TEXT], trainer)
        tokens = tokenizer.encode(TEXT).ids
        cases[name] = {"json": tokenizer.to_str(), "tokens": torch.tensor(tokens), "text": tokenizer.decode(tokens, skip_special_tokens=False)}
        assert cases[name]["text"] == TEXT or name == "characters", cases[name]["text"]
    torch.save(cases, sys.argv[1])


main()
