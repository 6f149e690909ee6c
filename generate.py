"""Generate text from any checkpoint.

    python generate.py out/tiny --prompt "def"
    python generate.py out/tiny/step-00001000 --prompt "import " --prompt "class " --temperature 0
    python generate.py DIR --chat --prompt "What is a tensor?"      a question to a chat model
    python generate.py DIR --adapter out/tiny-lora --chat ...       with a LoRA adapter

DIR is a run, one of its checkpoints, or a model directory of Meta or Hugging Face.

One prompt is continued as you watch. Several prompts are continued as one batch, and printed when
all of them have ended.
"""

import plumbing.startup  # first, for Ctrl-C during the imports
import argparse
import codecs
from functools import partial
from pathlib import Path

import torch

from checkpoint import check_tokenizer, find_adapter, find_checkpoint, load_pretrained, read_config
from lora import LoRALinear
from model import generate, stream
from plumbing.chat import encode_prompt
from plumbing.parser import Parser, nonnegative_float, nonnegative_int, positive_int
from plumbing.peft_files import load_adapter
from plumbing.processes import UserError, init_distributed, print_rank_zero, run
from plumbing.tokenizer import load_tokenizer


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Generate text from a checkpoint.")
    # fmt: off
    parser.add_argument("checkpoint", type=Path,
                        help="a run, one of its checkpoints, or a model directory of Meta or "
                             "Hugging Face")
    parser.add_argument("--adapter", type=Path, metavar="DIR",
                        help="a run of finetune_lora.py, or an adapter in PEFT's format")
    parser.add_argument("--prompt", action="append", default=[],
                        help="text to continue; given several times, the prompts form a batch")
    parser.add_argument("--chat", action="store_true",
                        help="treat each prompt as a user's message to a chat model")
    parser.add_argument("--tokenizer",
                        help="tokenizer name or file (default: the checkpoint's own)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=200,
                        help="number of tokens after which generation stops")
    parser.add_argument("--temperature", type=nonnegative_float, default=0.8,
                        help="sampling temperature; 0 takes the most likely token")
    parser.add_argument("--top-k", type=nonnegative_int, default=0,
                        help="number of most likely tokens to sample from; 0 for all")
    parser.add_argument("--top-p", type=nonnegative_float, default=0.95,
                        help="total probability of the most likely tokens to sample from")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    # fmt: on
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    process = init_distributed()  # under torchrun all ranks do the same work, and rank 0 prints
    directory = process.broadcast_from_rank_zero(partial(find_checkpoint, args.checkpoint))
    metadata = read_config(directory)
    if not (name := args.tokenizer or metadata["tokenizer"]):
        raise UserError(f"{directory} has no tokenizer.model: give its --tokenizer")
    tokenizer = process.local_rank_zero_first("tokenizer", partial(load_tokenizer, name))
    check_tokenizer(metadata, tokenizer)
    texts = args.prompt or [""]
    if args.chat:
        prompts = [encode_prompt([{"role": "user", "content": t}], tokenizer) for t in texts]
    else:
        prompts = [tokenizer.encode(text, bos=True) for text in texts]
    longest, max_seq_len = max(map(len, prompts)), metadata["model"].max_seq_len
    if longest + args.max_new_tokens > max_seq_len:
        raise UserError(
            f"a prompt of {longest} tokens and --max-new-tokens {args.max_new_tokens} are more "
            f"than the {max_seq_len} tokens of this model"
        )
    dtype = torch.bfloat16 if process.device.type == "cuda" else torch.float32
    model = load_pretrained(directory, dtype, process.device)
    if args.adapter:
        load_adapter(model, find_adapter(args.adapter))
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.merge()  # from here on the adapter costs no time

    options = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    options |= dict(stop=tokenizer.stop, seed=args.seed)
    if len(prompts) > 1:
        for text, tokens in zip(texts, generate(model, prompts, args.max_new_tokens, **options)):
            tokens = [token for token in tokens if token not in tokenizer.stop]
            print_rank_zero(f"--- {text}{tokenizer.decode(tokens)}")
        return
    # A character may consist of several tokens: the decoder waits for the last of its bytes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print_rank_zero("" if args.chat else texts[0], end="")
    for (token,) in stream(model, prompts, args.max_new_tokens, **options):
        if token not in tokenizer.stop:
            print_rank_zero(decoder.decode(tokenizer.decode_bytes([token])), end="")
    print_rank_zero(decoder.decode(b"", final=True) + "\n", end="")


if __name__ == "__main__":
    run(main)
