"""Generate text from any checkpoint.

    python generate.py out/tiny --prompt "def"
    python generate.py out/tiny/step-00001000 --prompt "import " --prompt "class " --temperature 0
    python generate.py DIR --chat --prompt "What is a tensor?"      a question to a chat model
    python generate.py DIR --chat --system "Be brief."              a conversation with it
    python generate.py DIR --adapter out/tiny-lora --chat ...       with a LoRA adapter
    python generate.py DIR --base-bits 4 --chat ...                 a 70B on one GPU
    python generate.py DIR --compile --chat ...                     for long answers

DIR is a run, one of its checkpoints, or a model directory of Meta or Hugging Face.

One prompt is continued as you watch. Several prompts are continued as one batch, and printed when
all of them have ended. In a conversation, every line that you type is a message, and the model
reads all messages before it answers. Ctrl-C stops an answer, Ctrl-D ends the conversation.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import codecs
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from files.adapters import open_adapter
from files.directories import find_adapter
from files.loading import find_model, load_pretrained
from lora import LoRA, add_adapters
from model import Llama, LlamaConfig
from plumbing.devices import has_bfloat16
from plumbing.flags import flag, values_of
from plumbing.joining import init_distributed
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import nonnegative_int, parse
from plumbing.processes import run
from techniques.decoding import check_length, generate, stream
from techniques.kv_cache import KVCache
from text.targets import encode_prompt, n_shared
from text.templates import Conversation
from text.tokenizer import Tokenizer

# fmt: off


@dataclass(frozen=True)
class ModelToLoad:
    """Which model a command loads, for find_model and load_model."""

    checkpoint: Path = flag(None, "a run, a checkpoint, or Meta's or Hugging Face's directory",
                            type=Path, is_positional=True)
    adapter: Path | None = flag(None, "a run of finetune_lora.py, or PEFT's files", type=Path,
                                metavar="DIR")
    base_bits: int = flag(16, "4: blocks in 4 bits, with a quarter of the memory, and slower",
                          type=int, choices=[16, 4])
    tokenizer: str | None = flag(None, "tokenizer name or file (default: the checkpoint's)")
    chat_template: str | None = flag(None, "one of the model's templates, or a file",
                                     metavar="NAME|FILE")


@dataclass(frozen=True)
class Generation(ModelToLoad):
    """Generate text from a checkpoint."""

    prompt: tuple[str, ...] = flag((), "text to continue; several form a batch", action="append")
    chat: bool = flag(False, "prompts are messages to a chat model; without one, a conversation")
    system: str | None = flag(None, "system prompt, the message with which a chat begins",
                              metavar="TEXT")
    max_new_tokens: int = flag(200, "tokens of an answer at most")
    temperature: float = flag(0.8, "sampling temperature; 0 takes the most likely token")
    top_k: int = flag(0, "number of most likely tokens to sample from; 0 for all",
                      type=nonnegative_int)
    top_p: float = flag(0.95, "total probability of the most likely tokens to sample from")
    seed: int = flag(0, "seed of the sampling", type=int)
    compile: bool = flag(False, "compile the blocks: the first token comes later, others sooner")
    # fmt: on

    def check(self) -> None:
        if self.system is not None and not self.chat:
            raise UserError("--system is a message to a chat model: give --chat, too")
        if self.top_p > 1:
            raise UserError(f"--top-p {self.top_p:g} is no probability: give 1 at most")


# --------------------------------------------------------------------------------- the command


def load_model(
    directory: Path, config: LlamaConfig, adapter: Path | None, base_bits: int, device: torch.device
) -> Llama:
    """Return a model with the adapter, if any: merged, unless the base is in 4 bits."""
    dtype = torch.bfloat16 if has_bfloat16(device) else torch.float32
    if base_bits == 16:
        return load_pretrained(directory, dtype, device, adapter=adapter)
    lora = open_adapter(adapter, config)[0] if adapter else LoRA(targets=())
    in_4_bits = partial(add_adapters, lora=lora, base_bits=4)  # without targets, it adds none
    return load_pretrained(directory, dtype, device, in_4_bits, adapter)


def compile_blocks(model: nn.Module) -> None:
    """Let each block's step be compiled at its first call, once for all blocks of a kind. Then the
    first answer takes longer to begin, and each token less."""
    torch._dynamo.config.recompile_limit = 64  # one for each number of rows and size of a cache
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, dynamic=False)


class Memory:
    """What a model has read in a conversation: tokens, and their cache, from answer to answer."""

    def __init__(self):
        self.tokens: list[int] = []
        self.cache = KVCache()

    def stream(self, model: Llama, prompt: list[int], **options) -> Iterator[int]:
        """Yield the tokens that continue a prompt, of which only what is new is read."""
        # The last old token may not be in the cache, and the prompt's last one has to be read for
        # its logits: so neither counts.
        known = n_shared(self.tokens[:-1], prompt[:-1])
        del self.tokens[known:]
        self.cache.go_back(known)
        for (token,) in stream(model, [prompt], cache=self.cache, **options):
            if len(self.tokens) == known:  # the first token: the prompt has been read
                self.tokens += prompt[known:]
            self.tokens.append(token)
            yield token


def stream_text(
    model: Llama, prompt: list[int], tokenizer: Tokenizer, memory: Memory | None = None, **options
) -> Iterator[str]:
    """Yield the text that continues a prompt, piece by piece; `options` as for stream."""
    memory = memory or Memory()
    # A character may consist of several tokens: the decoder waits for the last of its bytes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in memory.stream(model, prompt, **options):
        if token not in tokenizer.stop:
            yield decoder.decode(tokenizer.decode_bytes([token]))
    yield decoder.decode(b"", final=True)


def converse(model: Llama, tokenizer: Tokenizer, messages: Conversation, **options) -> None:
    """Answer the lines of standard input until it ends; `messages` is empty or a system prompt.
    What has been read for one answer is not read again for the next.

    In a terminal, Ctrl-C stops an answer or clears the line that is being typed. Otherwise, as in
    every other script, it ends the program."""
    options["memory"] = Memory()
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdin.reconfigure(errors="replace")
    if in_terminal:
        with contextlib.suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401 (gives `input` a line editor and a history)
        print("Ctrl-C stops an answer, Ctrl-D ends the conversation", file=sys.stderr)
    is_stopped = False
    with plumbing.endings.ctrl_c_raises() if in_terminal else contextlib.nullcontext():
        while True:
            try:  # a second Ctrl-C may come in print, too
                if is_stopped:
                    print()
                is_stopped = False
                text = input("> " if in_terminal else "")
                if text.strip():
                    messages = answer(model, tokenizer, messages, text, **options)
                    options["seed"] += 1  # every answer is sampled with random numbers of its own
            except KeyboardInterrupt:
                is_stopped = True
            except EOFError:
                break
    if in_terminal:
        print()


def answer(
    model: Llama, tokenizer: Tokenizer, messages: Conversation, text: str, **options
) -> Conversation:
    """Print the answer to a message. Return the conversation with both, or as it was if the answer
    is empty, or the message too long even without the exchanges before it."""
    new = options["max_new_tokens"]
    longest = model.config.max_seq_len
    asked = [*messages, {"role": "user", "content": text}]
    kept = drop_oldest(asked, tokenizer, longest - new)
    prompt = encode_prompt(kept, tokenizer)
    try:
        check_length(len(prompt), new, longest)
    except UserError as error:
        print(f"{error}: type a shorter message", file=sys.stderr)
        return messages
    if len(kept) < len(asked):
        print(
            f"the conversation and --max-new-tokens {new} are more than the {longest} tokens of "
            f"this model: its {len(asked) - len(kept)} oldest messages are dropped",
            file=sys.stderr,
        )
    said = ""
    with contextlib.suppress(KeyboardInterrupt):  # what has been said until then is the answer
        for piece in stream_text(model, prompt, tokenizer, **options):
            said += piece
            print(piece, end="", flush=True)
    print()
    if not said.strip():
        return messages
    return [*kept, {"role": "assistant", "content": said}]


def drop_oldest(messages: Conversation, tokenizer: Tokenizer, max_tokens: int) -> Conversation:
    """Return a conversation without its oldest exchanges of a question and an answer: as many are
    dropped as it takes for the prompt to have at most `max_tokens` tokens. A system prompt and the
    last message stay, even if they have more."""
    start = int(messages[0]["role"] == "system")
    while len(messages) > start + 2 and len(encode_prompt(messages, tokenizer)) > max_tokens:
        messages = messages[:start] + messages[start + 2 :]
    return messages


def main() -> None:
    args = parse(Generation)
    args.check()
    process = init_distributed()  # under torchrun all ranks do the same work, and rank 0 prints
    process.check_same_flags(values_of(args))  # all have joined: now an error ends them all
    has_conversation = args.chat and not args.prompt
    if has_conversation and process.size > 1:
        raise UserError("a conversation needs one process: run python generate.py, not torchrun")
    metadata, tokenizer = find_model(args.checkpoint, args.tokenizer, process, args.chat_template)
    directory, config = metadata["directory"], metadata["model"]
    adapter = args.adapter and find_adapter(args.adapter, directory)
    texts = args.prompt or [""]  # for a conversation, only to check the length
    system = [{"role": "system", "content": args.system}] if args.system else []
    prompts = []
    for text in texts:
        if args.chat:
            asked = [*system, {"role": "user", "content": text}]
            prompts.append(encode_prompt(asked, tokenizer))
        else:
            prompts.append(tokenizer.encode(text, bos=True))
    check_length(max(map(len, prompts)), args.max_new_tokens, config.max_seq_len)
    model = load_model(directory, config, adapter, args.base_bits, process.device)
    if args.compile:
        compile_blocks(model)

    options = dict(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=tokenizer.stop,
        compiled=args.compile,
    )
    if has_conversation:
        converse(model, tokenizer, system, **options)
        return
    if len(prompts) > 1:
        for text, tokens in zip(texts, generate(model, prompts, **options)):
            tokens = [token for token in tokens if token not in tokenizer.stop]
            print_rank_zero(f"--- {text}{tokenizer.decode(tokens)}")
        return
    print_rank_zero("" if args.chat else texts[0], end="")
    for piece in stream_text(model, prompts[0], tokenizer, **options):
        print_rank_zero(piece, end="")
    print_rank_zero("\n", end="")


if __name__ == "__main__":
    run(main)
