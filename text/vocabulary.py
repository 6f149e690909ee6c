"""A tokenizer: it converts text to token ids and back, and is saved as files.

All are byte-pair encodings. Text is first pre-tokenized: a regular expression divides it into
words. Each word is at first a sequence of bytes, the shortest tokens. Then neighbouring tokens are
merged into longer ones, in the order in which training found them. Ids follow that order: first
the 256 bytes, then the merged tokens, and last the special tokens, which no text is encoded to.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

from plumbing.messages import UserError
from text.settings import (
    SETTINGS,
    chat_template,
    folder_of,
    named_ids,
    read_settings,
    token_names,
)
from text.templates import default_form

# Llama 3's pre-tokenization: words with the space before them, numbers of at most three digits...
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES_PATTERN = r"(?s:.{1,256})"  # nothing is merged, so any division gives the same tokens
# Llama 3's 256 special tokens in order of id. Smaller tokenizers have the first eleven, which
# include all that have a meaning, so that models with any tokenizer can be fine-tuned on chat.
SPECIAL = (
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> "
    "<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> "
    "<|eom_id|> <|eot_id|> <|python_tag|>"
).split() + [f"<|reserved_special_token_{i}|>" for i in range(3, 248)]
N_SMALL_SPECIAL = SPECIAL.index("<|python_tag|>") + 1
LLAMA3_VOCAB_SIZE = 128_000  # without special tokens


class OtherKind(UserError):
    """A tokenizer of a kind that is not read here. It may be whole."""


class Tokenizer:
    """Converts text to token ids and back.

    name: what load_tokenizer was given
    files: content of the file it was read from, if any, and of the SETTINGS beside it, by name
    vocab, special: ids of the ordinary and of the special tokens
    added: ids of ordinary tokens that are found in a text before anything is merged
    spaces: of a token, whether it takes the spaces to its left, and to its right, with it
    pieces: bytes of all tokens by id
    word_pattern: regular expression of the pre-tokenization; None where it takes more than one
    bos, eos: ids of the tokens that begin and end a document
    beginning: ids that stand before a text
    template: chat template in Jinja
    names: bos_token, eos_token, ... as text, which a template may write
    named_bos: id that other programs are told of as the first of a text, if there is one
    stop: ids of the tokens that end generation"""

    def __init__(
        self,
        name: str,
        encoding: tiktoken.Encoding,
        file: Path | None = None,
        template: str | None = None,
    ):
        self.name = name
        self.encoding = encoding
        self.vocab: dict[bytes, int] = encoding._mergeable_ranks
        self.special: dict[str, int] = encoding._special_tokens
        self.added: dict[str, int] = {}
        self.spaces: dict[str, tuple[bool, bool]] = {}
        self.pieces = {i: token for token, i in self.vocab.items()}
        self.pieces |= {i: token.encode() for token, i in self.special.items()}
        self.word_pattern = encoding._pat_str
        self.vocab_size = encoding.n_vocab  # ordinary and special tokens
        # GPT-2 and its relatives have one token that both ends a document and begins the next.
        bos = "<|endoftext|>"
        ends = [bos]
        if "<|begin_of_text|>" in self.special:
            bos = "<|begin_of_text|>"
            ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
        # With small tokenizers, whose models are pretrained here, a document ends as an answer
        # does: fine-tuning cannot teach a model to end with a token that it has never seen.
        is_small = len(self.special) == N_SMALL_SPECIAL
        self.eos = self.special[ends[-1] if is_small else ends[0]]
        self.bos = self.special[bos]
        self.named_bos: int | None = self.bos
        self.beginning = [self.bos]
        self.stop = [self.special[token] for token in ends]
        self.names = {"bos_token": bos, "eos_token": ends[-1]}  # a template ends answers
        self.read_files(file, template)
        self.complete_form()

    def read_files(self, file: Path | None, template: str | None) -> None:
        """Keep the tokenizer's file and the SETTINGS beside it. Take from them names of tokens, ids
        that begin and end generation, and the chat template: of this name, or the default."""
        self.files: dict[str, bytes] = {}
        self.template = ""
        if not file:
            if template:
                raise UserError(f"tokenizer {self.name} has no --chat-template: leave it out")
            return
        folder = folder_of(file)
        kind = "json" if file.suffix == ".json" else "model"
        self.files[f"tokenizer.{kind}"] = file.read_bytes()
        for name in SETTINGS:
            if (folder / name).is_file():
                self.files[name] = (folder / name).read_bytes()
        self.template = chat_template(folder, template)
        if template:
            self.files["chat_template.jinja"] = self.template.encode()
        named = token_names(folder)
        self.names |= named
        begins = named_ids(folder, "bos_token_id")
        ends = named_ids(folder, "eos_token_id")
        # A checkpoint has another config.json: it keeps the ids where they are looked for first.
        settings = read_settings(folder, "generation_config.json")
        kept = dict(settings)
        if begins and settings.get("bos_token_id") is None:
            kept["bos_token_id"] = begins[0]
        if ends and settings.get("eos_token_id") is None:
            kept["eos_token_id"] = list(ends)
        if kept != settings:
            self.files["generation_config.json"] = json.dumps(kept).encode()
        if "bos_token" in named:
            begins.insert(0, self.special[named["bos_token"]])
        if "eos_token" in named:
            ends.insert(0, self.special[named["eos_token"]])
        self.named_bos = begins[0] if begins else self.named_bos
        # Ids without a token are those of a longer vocabulary.
        self.stop = [i for i in dict.fromkeys(ends) if i in self.pieces] or self.stop

    def complete_form(self) -> None:
        """Give a tokenizer without a chat template a form, whose answers end generation."""
        if not self.template:
            self.template, end = default_form(self.special, bool(self.beginning))
            name_of = {i: token for token, i in self.special.items()}
            self.names.setdefault("bos_token", name_of.get(self.bos, ""))
            self.names.setdefault("eos_token", name_of.get(self.stop[0], ""))
            end = end or self.names["eos_token"]
            if end in self.special:
                self.stop.append(self.special[end])
        self.stop = tuple(dict.fromkeys(self.stop))

    @functools.cached_property
    def special_pattern(self) -> re.Pattern:
        """Pattern of the special tokens' names, the longest first, with the spaces they take."""
        patterns = []
        for name in sorted(self.special, key=len, reverse=True):
            takes_left, takes_right = self.spaces.get(name, (False, False))
            left = r"\s*" if takes_left else ""
            right = r"\s*" if takes_right else ""
            patterns.append(left + re.escape(name) + right)
        return re.compile(f"({'|'.join(patterns)})")

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of a text. Names of special tokens in it are encoded as ordinary text."""
        return self.beginning * bos + self.encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a long text as uint32, faster than `encode`."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of ids. Ids without a token are left out: a model may generate some if
        its vocabulary is larger than the tokenizer's."""
        return b"".join(self.pieces.get(token, b"") for token in tokens)

    @functools.cached_property
    def hash(self) -> str:
        """Fingerprint of all tokens and of the pre-tokenization. If two are equal, the tokenizers
        encode alike."""
        vocab = sorted(self.vocab.items(), key=lambda item: item[1])
        meaning = repr((vocab, sorted(self.special.items()), self.word_pattern))
        return hashlib.sha256(meaning.encode()).hexdigest()[:16]

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text in each token [V]: 0 for special tokens and for ids without a token."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        lengths[list(self.pieces)] = [len(piece) for piece in self.pieces.values()]
        lengths[list(self.special.values())] = 0
        return lengths

    def count_bytes(self, targets: np.ndarray) -> int:
        """Return the bytes of text in targets of any shape; what is no id counts as none."""
        is_id = (targets >= 0) & (targets < self.vocab_size)
        return int(self.token_bytes[targets[is_id]].sum())

    def in_printable_characters(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return the ordinary tokens in GPT-2's alphabet with their ids, and all merges, the
        preferred ones first.

        Meta's format has no merges: any two tokens that make a third may be merged, and a merge
        with a lower resulting id is preferred."""
        vocab = {}
        for token, i in self.vocab.items():
            vocab["".join(CHARACTER_OF_BYTE[byte] for byte in token)] = i
        merges = []
        for token in sorted(vocab, key=vocab.get):
            pairs = []
            for i in range(1, len(token)):
                left, right = token[:i], token[i:]
                if left in vocab and right in vocab:
                    pairs.append((left, right))
            merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        return vocab, merges

    def save(self, directory: Path) -> dict[str, str]:
        """Write the tokenizer's files, unless its name is enough to load it. Return what the
        directory's metadata are to say of it."""
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        name = next(iter(self.files), self.name)
        return {"tokenizer": name, "tokenizer_hash": self.hash}

    def save_published(self, directory: Path) -> None:
        """Write the tokenizer's files and, unless it has none, what transformers needs beside them;
        then what a chat needs: a template, and the tokens that end an answer."""
        self.save(directory)
        made = {}
        if self.files and "tokenizer.json" not in self.files:
            made["tokenizer.json"] = tokenizer_json(self)
        if self.files and "tokenizer_config.json" not in self.files:
            made["tokenizer_config.json"] = self.names | {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
            }
        if settings := read_settings(directory, "generation_config.json"):
            made["generation_config.json"] = settings | {"eos_token_id": list(self.stop)}
        for file, content in made.items():
            (directory / file).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        if not chat_template(directory):
            (directory / "chat_template.jinja").write_text(self.template, "utf-8")


def has_all_ids(vocab: dict[bytes, int]) -> bool:
    """Return whether ordinary tokens have the ids 0, 1, ... and are all bytes, or more."""
    has_bytes = all(bytes([byte]) in vocab for byte in range(256))  # tiktoken dies without one
    return has_bytes and sorted(vocab.values()) == list(range(len(vocab)))


def with_special_tokens(name: str, vocab: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    """Return the encoding of ordinary tokens, with special tokens of Llama 3 after them."""
    n_special = len(SPECIAL) if len(vocab) == LLAMA3_VOCAB_SIZE else N_SMALL_SPECIAL
    special = {token: len(vocab) + i for i, token in enumerate(SPECIAL[:n_special])}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=vocab, special_tokens=special)


# -------------------------------------------------------------- Hugging Face's file: tokenizer.json
# JSON cannot hold bytes, so a token is written in GPT-2's alphabet, which has a character for each
# byte: a printable character of Latin-1 for itself, U+0100 and the following for the 68 others.

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE}
CHARACTER_OF_BYTE |= {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}


def tokenizer_json(tokenizer: Tokenizer) -> dict:
    """Return the content of a tokenizer.json."""
    vocab, merges = tokenizer.in_printable_characters()
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [{"id": i, "content": token, **flags} for token, i in tokenizer.special.items()]
    pattern = {"Regex": tokenizer.word_pattern}
    split = dict(type="Split", pattern=pattern, behavior="Isolated", invert=False)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    name_of = {i: token for token, i in tokenizer.special.items()}
    bos = name_of[tokenizer.bos]
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}  # as in training; Meta's file has it, too
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "version": "1.0",
        "normalizer": None,
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, begin, second],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos], "tokens": [bos]}},
        },
        "decoder": byte_level,
        # With ignore_merges, a word that is a token is not merged from its bytes.
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
