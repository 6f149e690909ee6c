"""Continue a text with any checkpoint.

    python generate.py out/tiny --prompt "def"
    python generate.py out/tiny/step-00001000 --prompt "import " --prompt "class " --temperature 0
    python generate.py DIR --chat --prompt "What is a tensor?"      as chat.py has it
    python generate.py DIR --adapter out/tiny-lora --chat ...       with what LoRA has learnt

DIR is a run, a checkpoint of it, or a model's directory by Meta or Hugging Face.

One prompt is continued as you watch; several are continued side by side, and shown when all end.
"""

import argparse
import codecs
from pathlib import Path

import torch

from chat import encode_prompt
from checkpoint import (
    check_tokenizer,
    find_adapter,
    find_checkpoint,
    load_pretrained,
    read_config,
)
from data import load_tokenizer
from lora import LoRALinear, load_adapter
from model import UserError, stream
from parallel import Parser, amount, count, positive, run


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Continue a text.")
    # fmt: off
    parser.add_argument("checkpoint", type=Path,
                        help="a run, one of its step-N, or a model's directory")
    parser.add_argument("--adapter", type=Path, metavar="DIR",
                        help="a run of finetune_lora.py, or an adapter in PEFT's format")
    parser.add_argument("--prompt", action="append", default=[],
                        help="text to continue; several are continued side by side")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says")
    parser.add_argument("--tokenizer", help="in place of the checkpoint's own")
    parser.add_argument("--max-new-tokens", type=positive, default=200)
    parser.add_argument("--temperature", type=amount, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top-k", type=count, default=0, help="choose among so many, 0 for all")
    parser.add_argument("--top-p", type=amount, default=0.95, help="choose among this much")
    parser.add_argument("--seed", type=int, default=0)
    # fmt: on
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    directory = find_checkpoint(args.checkpoint)
    about = read_config(directory)
    if not (name := args.tokenizer or about["tokenizer"]):
        raise UserError(f"{directory} has no tokenizer.model: give its --tokenizer")
    tokenizer, config = load_tokenizer(name), about["model"]
    check_tokenizer(about, tokenizer)
    texts = args.prompt or [""]
    if args.chat:
        prompts = [encode_prompt([{"role": "user", "content": t}], tokenizer) for t in texts]
    else:
        prompts = [tokenizer.encode(text, bos=True) for text in texts]
    longest = max(map(len, prompts))
    if longest + args.max_new_tokens > config.max_seq_len:
        raise UserError(
            f"a prompt of {longest} tokens and --max-new-tokens {args.max_new_tokens} are more "
            f"than the {config.max_seq_len} tokens of this model"
        )
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = load_pretrained(directory, dtype, "cuda" if on_gpu else "cpu")
    if args.adapter:
        load_adapter(model, find_adapter(args.adapter))
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.merge()  # from here on the adapter costs nothing

    turns = stream(
        model, prompts, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
        stop=tokenizer.stop, seed=args.seed,
    )  # fmt: skip
    if len(prompts) == 1:  # as it comes; a character may take several tokens
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        print("" if args.chat else texts[0], end="")
        for (token,) in turns:
            text = (
                "" if token in tokenizer.stop else decoder.decode(tokenizer.decode_bytes([token]))
            )
            print(text, end="", flush=True)
        print(decoder.decode(b"", final=True))
        return
    rows = [[token for token in row if token is not None] for row in zip(*turns)]
    for text, row in zip(texts, rows):
        end = len(row) - (row[-1] in tokenizer.stop)
        print(f"--- {text}{tokenizer.decode(row[:end])}")


if __name__ == "__main__":
    run(main)
