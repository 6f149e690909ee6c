"""Tokenizers of other Llamas and of Qwen: a tokenizer.json, read by Hugging Face's `tokenizers`.

Two kinds are read, both byte-pair encodings. A byte-level one has a character for each byte of text
(SmolLM2, Qwen). One of SentencePiece's kind (Llama 2, TinyLlama, Yi) has ▁ for a space, often puts
one more before a text, and falls back to bytes for characters that it does not know.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from plumbing.json_files import JsonFile, parse_json
from plumbing.messages import UserError
from text.settings import listed_tokens, special_names
from text.vocabulary import BYTE_OF_CHARACTER, OtherKind, Tokenizer

# Names of tokens that end a text, for a tokenizer.json of which no other file says what does.
ENDS = "<|im_end|> <|endoftext|> <|eot_id|> <|end_of_text|> <end_of_turn> <eos> </s>".split()


class PublishedTokenizer(Tokenizer):
    """A tokenizer.json, with the interface of Tokenizer. Raises UserError for what it cannot read.

    The space that SentencePiece's kind puts before a text counts as a byte of it."""

    def __init__(self, name: str, path: Path, template: str | None = None):
        self.name = name
        self.names = {}
        try:
            import tokenizers
        except ImportError:
            raise OtherKind(f"{path} is not Llama 3's, and needs a package: pip install tokenizers")
        described = JsonFile(path).get("model")
        for field in ("continuing_subword_prefix", "end_of_word_suffix"):
            if isinstance(described, dict) and described.get(field):
                found = f"{field} {described[field]!r:.60}"
                raise OtherKind(f"{path} has the {found}: only BPE without it works here")
        with _refusing(f"{path} is no tokenizer"):
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        model = self.inner.model
        words = json.dumps(self.step("pre_tokenizer"))
        is_byte_level = '"ByteLevel"' in words
        is_bpe = isinstance(model, tokenizers.models.BPE)
        falls_back = is_bpe and model.byte_fallback and '"Metaspace"' not in words
        if not is_bpe or not (is_byte_level or falls_back):
            raise OtherKind(
                f"{path} has a {type(model).__name__} and pre-tokenizes by {words:.100}: only "
                f"byte-level BPE works here, and BPE that falls back to bytes, with its spaces in "
                f"a normalizer"
            )
        if model.dropout:
            raise UserError(
                f"{path} has dropout {model.dropout:g}, so that a text has other ids each time: "
                f"set it to null"
            )
        self.word_pattern = None
        self.inner.no_truncation()
        self.inner.no_padding()
        self.inner.encode_special_tokens = True  # their names in a text are ordinary text
        self._add_tokens_beside(path)
        added = self.inner.get_added_tokens_decoder()
        vocab = self.inner.get_vocab(with_added_tokens=False)
        self.pieces = {i: _bytes_of(token, is_byte_level) for token, i in vocab.items()}
        self.special, self.added, self.spaces = {}, {}, {}
        for i, token in added.items():
            kind = self.special if token.special else self.added
            kind[token.content] = i
            self.pieces[i] = token.content.encode()
            self.spaces[token.content] = token.lstrip, token.rstrip
        self.vocab_size = max(self.pieces, default=0) + 1
        if self.vocab_size > 1 << 24:  # not every id needs a token, but its bytes are counted
            raise UserError(f"{path} has a token of the id {self.vocab_size - 1:,}: is it damaged?")
        self.beginning, self.ending = self._ids_around_a_text()
        self.named_bos = self.beginning[0] if self.beginning else None
        self.stop = [self.special[token] for token in ENDS if token in self.special]
        self.read_files(path, template)
        if not self.stop:
            raise UserError(f"{path} has no token that ends a text: tokenizer_config.json names it")
        # As with GPT-2, <|endoftext|> both ends a document and begins the next.
        end_of_text = self.special.get("<|endoftext|>")
        self.eos = end_of_text if end_of_text in self.stop else self.stop[0]
        self.bos = self.beginning[0] if self.beginning else self.eos
        self.complete_form()

    def _add_tokens_beside(self, path: Path) -> None:
        """Add the tokens that only the files beside a tokenizer.json have, as transformers does."""
        from tokenizers import AddedToken

        before = self.inner.get_vocab()
        listed = listed_tokens(path.parent)
        self.inner.add_tokens([AddedToken(**flags) for _, flags in listed])
        for i, flags in listed:
            found = self.inner.token_to_id(flags["content"])
            if found != i:
                raise UserError(
                    f"{path} has no {flags['content']!r:.60} of the id {i}, which the files beside "
                    f"it list: save the tokenizer once more with transformers"
                )
        for name in special_names(path.parent):
            if self.inner.token_to_id(name) is None:
                raise UserError(
                    f"{path} has no {name!r:.60}, which the files beside it name: save the "
                    f"tokenizer once more with transformers"
                )
        # A token that begins or ends a text need not be special in the file.
        self.inner.add_special_tokens(special_names(path.parent))
        self.n_added = len(self.inner.get_vocab()) - len(before)

    def _ids_of(self, text: str, **options) -> list[int]:
        with _refusing(f"{self.name} cannot encode a text"):
            return self.inner.encode(text, **options).ids

    def _ids_around_a_text(self) -> tuple[list[int], list[int]]:
        """Return the ids that the file puts before a text, and those after it."""
        whole = self._ids_of("a", add_special_tokens=True)
        text = self._ids_of("a", add_special_tokens=False)
        for i in range(len(whole)):
            end = i + len(text)
            if whole[i:end] == text:
                return whole[:i], whole[end:]
        return [], []

    def step(self, name: str) -> dict | None:
        """Return a step: "normalizer", "pre_tokenizer", "decoder" or "post_processor". It is what
        the package has understood, which has checked it, rather than the file once more."""
        step = getattr(self.inner, name)
        return step and json.loads(step.__getstate__())

    def merges_all_tokens(self) -> bool:
        """Return whether merges make each token of its bytes, as they must without the model's
        `ignore_merges`."""
        from tokenizers.models import BPE

        vocab, merges = self.in_printable_characters()
        model = BPE(vocab, merges)
        known = self.special | self.added
        return all(len(model.tokenize(token)) == 1 for token in vocab if token not in known)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        ids = self._ids_of(text, add_special_tokens=False)
        if not bos:
            return ids
        return self.beginning + ids or [self.bos]  # a prompt is never empty

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.uint32)

    @cached_property
    def hash(self) -> str:
        content = self.files["tokenizer.json"]
        if self.n_added:  # from the files beside it
            content += repr(sorted((self.special | self.added).items())).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def in_printable_characters(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        content = parse_json(self.files["tokenizer.json"], self.name)
        merges = []
        for pair in content["model"]["merges"]:
            merges.append(tuple(pair.split(" ") if isinstance(pair, str) else pair))
        return self.inner.get_vocab(with_added_tokens=False), merges


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Within this context, an error of the package `tokenizers` is one of its file."""
    try:
        yield
    except BaseException as error:  # where Rust panics, no Exception is raised
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {error}")
        raise


def _bytes_of(token: str, is_byte_level: bool) -> bytes:
    if is_byte_level:
        character_bytes = [BYTE_OF_CHARACTER.get(character) for character in token]
        # A token with a character outside of the alphabet is text as it is.
        return token.encode() if None in character_bytes else bytes(character_bytes)
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
