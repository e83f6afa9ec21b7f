"""Two tiny tokenizers for the same text: one of words, whose ids are numbers of words, and one of characters."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = 160


def of_words() -> Any:
    """Token `n` is the word `n`, behind a space."""
    tokenizer = Tokenizer(models.WordLevel({f" {number}": number for number in range(WORDS)}, unk_token=" 0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" \d+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" 0", clean_up_tokenization_spaces=False)


def of_characters() -> Any:
    """Token `n` is one of the digits, a space, or one of the words too."""
    alphabet = {name: place for place, name in enumerate((*"0123456789 ", *(f" {one}" for one in range(10, WORDS))))}
    tokenizer = Tokenizer(models.BPE(alphabet, [], unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0", clean_up_tokenization_spaces=False)
