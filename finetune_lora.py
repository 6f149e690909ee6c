"""Fine-tune a Llama with LoRA: teach it to answer, by learning a hundredth of its weights.

    torchrun train.py                                            a base: minutes on a laptop
    torchrun finetune_lora.py --init out/tiny                    teach it to write docstrings
    torchrun --nproc-per-node 2 finetune_lora.py --init out/tiny --out out/two       two processes
    torchrun --nproc-per-node 8 finetune_lora.py --init ~/Llama-3.1-8B --data chats.jsonl \\
             --seq-len 4096 --batch 64 --microbatch 4 --lr 2e-4 --rank 16 --merge

Data is JSON, a conversation a line (chat.py): {"messages": [{"role", "content"}...]}, or
instruction, input and output, or prompt and completion. A row of a batch holds as many samples as
fit, and none sees another.

The base is frozen, so it has no gradients to send. With --dp ddp, the default where a copy fits, a
step sends the adapters' gradients once and nothing else, and more processes make it faster. What
every split would send is printed at the start.

Every checkpoint is an adapter in PEFT's format; --merge also writes the model with it added.
"""

import argparse
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import checkpoint
from chat import open_samples
from cost import choose_split, predict_traffic
from data import load_tokenizer
from lora import TARGETS, LoRA, adapt_loss, add_adapters, init_adapters
from lora import load_adapter as load_adapter  # for those who look for it here
from model import Llama, UserError, generate
from parallel import Parser, World, amount, positive, put_shard, run
from train import add_flags, asked_split, begin, check, choose_tokenizer, fit, show, split_model


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Fine-tune a Llama with LoRA.")
    # fmt: off
    base = parser.add_argument_group("base")
    base.add_argument("--init", type=Path, metavar="DIR", required=True,
                      help="the model to start from: a checkpoint, a run, or a directory of Meta's "
                           "or Hugging Face's")
    base.add_argument("--tokenizer", help="name or tokenizer.model (default: the base's)")

    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", default=["python"],
                      help="JSON lines, files or directories; python: docstrings to write for the "
                           "standard library's functions")
    data.add_argument("--seq-len", type=positive, default=512, help="tokens in a row of samples")
    data.add_argument("--long", choices=["truncate", "drop"], default="truncate",
                      help="what to do with samples of more tokens")
    data.add_argument("--train-on-prompt", action="store_true",
                      help="learn to write prompts, too, and not answers alone")

    lora = parser.add_argument_group("LoRA")
    lora.add_argument("--rank", type=positive, default=8, help="numbers between A and B")
    lora.add_argument("--alpha", type=amount, default=16.0, help="scale is alpha / rank")
    lora.add_argument("--rslora", action="store_true", help="scale is alpha / sqrt(rank)")
    lora.add_argument("--dropout", type=amount, default=0.0, help="part of A's input set to zero")
    lora.add_argument("--targets", nargs="+", choices=TARGETS, default=list(LoRA.targets),
                      metavar="MATRIX", help=f"of {' '.join(TARGETS)} (default: all but output)")
    lora.add_argument("--merge", action="store_true",
                      help="at the end write OUT/merged, the model with the adapter added")
    # fmt: on
    add_flags(parser)
    parser.set_defaults(steps=300, warmup=20, weight_decay=0.0, eval_every=100, save_every=100)
    args = parser.parse_args()
    args.targets = [target for target in TARGETS if target in args.targets]
    if args.dropout >= 1:
        raise UserError(f"--dropout {args.dropout:g} leaves nothing: give a number below 1")
    if args.alpha == 0:
        raise UserError("--alpha 0 learns nothing: give a number above 0")
    init = args.init.resolve()
    name = init.parent.name if init.name.startswith("step-") else init.name
    args.out = args.out or Path("out") / f"{name}-lora"
    return args


def traffic_of_all(args: argparse.Namespace, model: Llama, world: World) -> str:
    """Megabytes that a step sends in each split of the batch that these processes could have."""
    choices = {f"--dp {dp}": {"dp": dp, "reshard": "auto"} for dp in ("ddp", "fsdp", "hsdp")}
    shard = args.shard if args.dp == "hsdp" else None
    for reshard in ("none", "adapters"):
        choices[f"--dp fsdp --reshard {reshard}"] = {"dp": "fsdp", "reshard": reshard}
    if world.per_node == world.size and not shard:
        del choices["--dp hsdp"]  # which would be fsdp
    share = args.batch * args.tp // world.size
    microbatch = args.microbatch or share
    told = []
    for name, choice in choices.items():
        asked = replace(asked_split(args), offload=False, **choice)
        tokens, microbatches = microbatch * args.seq_len, share // microbatch
        split, _ = choose_split(asked, shard, model, world, tokens, microbatches)
        sent = predict_traffic(model, split, microbatches, microbatch, args.seq_len)
        told.append(f"{name} {sum(nbytes for _, nbytes in sent.values()) / 1e6:,.2f} MB")
    return "; ".join(told)


def main() -> None:
    args = parse_args()
    world = begin(args)
    lora = LoRA(args.rank, args.alpha, args.dropout, args.rslora, tuple(args.targets))

    # The base, and what it is to learn.
    directory = world.from_first(partial(checkpoint.find_checkpoint, args.init))
    base = checkpoint.read_config(directory)
    args.init = directory  # of which the run's record says exactly what it began with
    check(args, base["model"], world)
    if args.rank > base["model"].dim:
        raise UserError(f"--rank {args.rank} is more than the model's width {base['model'].dim}")
    merged = args.out / "merged"
    if args.merge and merged.exists():
        raise UserError(f"{merged} exists: remove it, or leave out --merge")
    tokenizer = world.one_first("tokenizer", partial(load_tokenizer, choose_tokenizer(args, base)))
    checkpoint.check_tokenizer(base, tokenizer)
    train_set, val_set, examples, counts = open_samples(
        args.data, tokenizer, args.seq_len, args.long, args.train_on_prompt, world.rank > 0
    )
    if len(set(world.gather([train_set.checksum()]).flatten().tolist())) > 1:
        raise UserError(f"{' '.join(args.data)} holds other samples on other ranks: copy the files")
    show(counts)
    newest = world.from_first(partial(checkpoint.claim, args.out))

    # The model with adapters beside its matrices, split over this world, and the training.
    with torch.device("meta"):
        model = Llama(base["model"])
        add_adapters(model, lora)

    def fill(model: Llama) -> None:
        checkpoint.load_weights(directory, model)
        init_adapters(model, args.seed, put_shard, world.device)

    if world.size > 1:
        show(f"a step would send {traffic_of_all(args, model, world)}")
    world, runner = split_model(args, model, world, fill)
    adapt_loss(model)

    def samples(step: int) -> str:
        if not examples:
            return "no held-out prompt is short enough to show"
        prompts = [prompt for prompt, _ in examples]
        answers = generate(model, prompts, 64, temperature=0.0, stop=tokenizer.stop)
        told = [
            f"{'' if step else tokenizer.decode(prompt)}"
            f"--- {f'after {step} steps' if step else 'the base'}: {tokenizer.decode(answer)}\n"
            f"--- as it should be: {wanted}"
            for (prompt, wanted), answer in zip(examples, answers)
        ]
        return "\n".join([*told, "---"])

    finished = fit(args, world, model, runner, train_set, val_set, tokenizer, newest, samples, lora)
    if args.merge and finished and world.rank == 0:
        checkpoint.merge(directory, checkpoint.find_adapter(args.out), merged, tokenizer)
        show(f"merged:     {merged}")
    names = f"{shlex.quote(str(args.init))} --adapter {shlex.quote(str(args.out))}"
    show(f"generate:   python generate.py {names} --chat --prompt ...")


if __name__ == "__main__":
    run(main)
