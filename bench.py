"""Measure how fast this is, and how far from what the machine can do.

python bench.py limit       a training step beside the bare matrix products it cannot do without
python bench.py lora        a LoRA step beside its bare products, peft's, and a full step
python bench.py loss        memory of the chunked loss beside the plain one
torchrun --nproc-per-node 4 bench.py compare [one ddp fsdp hsdp] [--lora] [--plot FILE.png]
                            the same step, split in different ways: those named, or all that fit
torchrun --nproc-per-node 4 bench.py comm [--out comm.json]
                            what the links between ranks give
torchrun --nproc-per-node 4 bench.py step [train.py's flags]
                            where the time of that training's step goes, and which flag helps
python bench.py plan --model llama3.1-70b --gpus 64 [--check]
                            what every split would cost on a cluster, without having one
"""

import argparse
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from comm import SIZES, measure_comm
from compare import STRATEGIES, measure_compare
from data import Batch
from diagnose import measure_step
from lora import LoRA
from measure import interleaved, step_of, table
from model import PRESETS, Llama, LlamaConfig, UserError, cross_entropy_sum
from parallel import Parser, World, arrange, positive, run, set_up
from plan import GPUS, LINKS, plan_cluster
from train import add_pretraining_flags, make_optimizer, memory_bytes


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Measure.")
    # fmt: off
    commands = parser.add_subparsers(dest="command", required=True)
    limit = commands.add_parser("limit", help="a training step beside its bare matrix products")
    lora = commands.add_parser("lora", help="a LoRA step beside its bare products, and peft's")
    for command in (limit, lora):
        command.add_argument("--model", default="medium", choices=PRESETS, help="preset")
        command.add_argument("--batch", type=positive, default=4, help="sequences a step")
        command.add_argument("--seq-len", type=positive, default=512, help="tokens in a sequence")
        command.add_argument("--repeats", type=positive, default=11, help="rounds of all")
        command.add_argument("--compile", action="store_true", help="also with compiled blocks")
    lora.add_argument("--rank", type=positive, default=8)
    compare = commands.add_parser("compare", help="the same step, split in different ways")
    compare.add_argument("strategies", nargs="*", metavar="STRATEGY", type=strategy,
                         help=f"of {', '.join(STRATEGIES)}; one: the first process alone; "
                              "fsdp-X: with --reshard X; selective, full, compiled: ddp with it "
                              "(default: all that fit)")
    compare.add_argument("--model", default="tiny", choices=PRESETS, help="preset")
    compare.add_argument("--batch", type=positive, default=8, help="sequences a step, in all")
    compare.add_argument("--microbatch", type=positive, default=1)
    compare.add_argument("--seq-len", type=positive, default=128, help="tokens in a sequence")
    compare.add_argument("--repeats", type=positive, default=5, help="rounds of all contestants")
    compare.add_argument("--lora", action="store_true", help="train adapters of rank 8")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to it too")
    compare.add_argument("--plot", type=Path, metavar="FILE.png",
                         help="draw them; needs matplotlib")
    plan = commands.add_parser("plan", help="what every split would cost on a cluster")
    plan.add_argument("--model", choices=PRESETS, help="preset (default: llama3.1-8b)")
    plan.add_argument("--gpus", type=positive, default=8, help="of the whole cluster")
    plan.add_argument("--per-node", type=positive, default=8, help="GPUs of a node")
    plan.add_argument("--gpu", default="h100",
                      help=f"{', '.join(GPUS)}, or TFLOP/s:GB:GB/s:GB/s, which are its peak, its "
                           "memory, its memory's bandwidth, its link within a node")
    plan.add_argument("--link", default="400gbit",
                      help=f"of each GPU to other nodes: {', '.join(LINKS)}, or a speed")
    plan.add_argument("--measured", type=Path, metavar="FILE",
                      help="of bench.py comm --model: that cluster in place of --gpus, --per-node, "
                           "--gpu and --link, and its model, if no other is given")
    plan.add_argument("--batch", type=positive, help="sequences a step (default: 2 a GPU)")
    plan.add_argument("--seq-len", type=positive, help="tokens in a sequence (default: 8192)")
    plan.add_argument("--dtype", choices=["bfloat16", "float32"],
                      help="of computation (default: bfloat16)")
    plan.add_argument("--compile", action=argparse.BooleanOptionalAction,
                      help="compiled blocks (default: yes)")
    for name in ("shard", "tp", "microbatch"):
        plan.add_argument(f"--{name}", type=positive, help="only plans with so much of it")
    plan.add_argument("--checkpointing", choices=["none", "selective", "full"], help="only this")
    plan.add_argument("--reshard", choices=["none", "weights", "all"], help="only this")
    plan.add_argument("--top", type=positive, default=12, help="rows of the table")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write all plans to it")
    plan.add_argument("--check", action="store_true",
                      help="run a step of the best one's first rank, without the others and "
                           "without numbers, and count")
    loss = commands.add_parser("loss", help="memory of the chunked loss beside the plain one")
    loss.add_argument("--tokens", type=positive, default=4096)
    loss.add_argument("--dim", type=positive, default=512)
    loss.add_argument("--vocab-size", type=positive, default=128_256)
    comm = commands.add_parser("comm", help="what the links between ranks give")
    comm.add_argument("--sizes", nargs="+", type=positive, default=SIZES, metavar="BYTES",
                      help=f"of messages (default: {' '.join(map(str, SIZES))})")
    comm.add_argument("--repeats", type=positive, default=11, help="rounds of all collectives")
    comm.add_argument("--out", type=Path, help="JSON file to write the numbers to, too")
    comm.add_argument("--model", choices=PRESETS,
                      help="also time a microbatch of it, for bench.py plan --measured")
    comm.add_argument("--microbatch", type=positive, default=1)
    comm.add_argument("--seq-len", type=positive, default=512, help="tokens in a sequence")
    step = commands.add_parser("step", help="where the time of a training step goes")
    step.add_argument("--repeats", type=positive, default=15, help="rounds of all measurements")
    add_pretraining_flags(step)
    # fmt: on
    return parser.parse_args()


def strategy(text: str) -> str:
    """Type of an argument that is one of STRATEGIES. Not by `choices`: to those, some versions of
    argparse hold even the empty list that stands for no argument."""
    if text not in STRATEGIES:
        raise argparse.ArgumentTypeError(f"expected {', '.join(STRATEGIES)}, got '{text}'")
    return text


# ------------------------------------------------------------------------------------------- limit


def bare_products(
    config: LlamaConfig, batch: int, seq_len: int, device: torch.device, rank: int = 0
) -> Callable:
    """The matrix products and the attention of a training step, with nothing between them.

    Each weight [out, in] is multiplied three times: by its input, and by the gradient of its output
    for that of its input and for its own. With adapters of a `rank` beside all but the output the
    last of these falls away, and both factors, A [r, in] and B [out, r], are multiplied three times
    instead, each in the fastest order of several. What a step takes beyond this is overhead."""
    with torch.device("meta"):
        shapes = [m.weight.shape for m in Llama(config).modules() if isinstance(m, nn.Linear)]
    n = batch * seq_len
    weights = [torch.randn(shape, device=device) for shape in shapes]
    widths = {width for shape in shapes for width in shape} | {rank}
    rows = {width: torch.randn(n, width, device=device) for width in widths}
    factors = {width: torch.randn(rank, width, device=device) for width in widths}
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads)
    q, k, v, grad = (
        torch.randn(batch, seq_len, h, config.head_dim, device=device).transpose(1, 2)
        for h in heads
    )
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))

    def step():
        for i, weight in enumerate(weights):
            x, g = rows[weight.shape[1]], rows[weight.shape[0]]
            torch.mm(x, weight.T)
            if not (rank and i < 3):  # nothing below the first wq, wk and wv learns
                torch.mm(g, weight)
            if not rank:
                torch.mm(g.T, x)
            elif i < len(weights) - 1:
                A, B, low = factors[weight.shape[1]], factors[weight.shape[0]], rows[rank]
                for left, right in ((x, A.T), (low, B), (g, B.T), (low, A), (low.T, x), (low.T, g)):
                    torch.mm(left, right)
        for _ in range(config.n_layers):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=config.n_heads != config.n_kv_heads
            )
            torch.autograd.grad(out, (q, k, v), grad)

    return step


def our_step(
    config: LlamaConfig,
    batch: Batch,
    world: World,
    compiled: bool = False,
    lora: LoRA | None = None,
) -> Callable:
    """train.py's own step: forward, backward, clipping, fused AdamW."""
    world = arrange(world, replace(world.split, compile=compiled))
    return step_of(config, batch, len(batch.tokens), world, lora)


def transformers_step(
    config: LlamaConfig, batch: Batch, world: World, lora: LoRA | None = None
) -> Callable:
    """The same step with transformers' LlamaForCausalLM, and peft's adapters beside seven matrices
    of a block, with plain PyTorch around it."""
    try:
        import peft
        import transformers
    except ImportError:
        raise UserError("this compares with other packages: pip install -r requirements-dev.txt")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.ffn_dim,
            vocab_size=config.vocab_size,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
            use_cache=False,
        )
    ).to(world.device)
    if lora:
        options = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, options)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)

    def step():
        # shift_labels: targets as they are, instead of labels that are shifted once more
        out = model(input_ids=batch.tokens, labels=batch.targets, shift_labels=batch.targets)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return out.loss.item()

    return step


def any_batch(args: argparse.Namespace, world: World) -> Batch:
    """Random tokens: how long a step takes does not depend on what they say."""
    vocabulary = PRESETS[args.model].vocab_size
    tokens = torch.randint(vocabulary, (args.batch, args.seq_len + 1), device=world.device)
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), None, text_bytes=1)


def measure_limit(args: argparse.Namespace) -> str:
    world, config = set_up(), PRESETS[args.model]
    batch = any_batch(args, world)
    contestants = {
        "bare matrix products and attention": bare_products(
            config, args.batch, args.seq_len, world.device
        ),
        "transformers": transformers_step(config, batch, world),
        "flatllama": our_step(config, batch, world),
    }
    if args.compile:
        contestants["flatllama, compiled blocks"] = our_step(config, batch, world, compiled=True)
    return table(interleaved(contestants, args.repeats), args.batch * args.seq_len)


# -------------------------------------------------------------------------------------------- LoRA


def measure_lora(args: argparse.Namespace) -> str:
    """Time of a step, and the memory that adapters take to train, each in a process of its own."""
    memory = ["", "| adapters by | peak memory |", "|---|--:|"]
    for name, make in {"peft on transformers": transformers_step, "flatllama": our_step}.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # while this process is small
            peak = pool.apply(lora_peak, (make, args, torch.get_num_threads()))
        memory.append(f"| {name} | {peak / 1e9:.2f} GB |")
    world, config, lora = set_up(), PRESETS[args.model], LoRA(args.rank)
    batch = any_batch(args, world)
    contestants = {
        "bare products of LoRA and attention": bare_products(
            config, args.batch, args.seq_len, world.device, lora.rank
        ),
        "peft on transformers": transformers_step(config, batch, world, lora),
        "flatllama LoRA": our_step(config, batch, world, lora=lora),
        "flatllama, all weights": our_step(config, batch, world),
    }
    if args.compile:
        contestants["flatllama LoRA, compiled blocks"] = our_step(config, batch, world, True, lora)
    return "\n".join(
        [table(interleaved(contestants, args.repeats), args.batch * args.seq_len), *memory]
    )


def lora_peak(make: Callable, args: argparse.Namespace, threads: int) -> int:
    """Bytes that three steps need beyond a process with everything imported, weights included."""
    torch.set_num_threads(threads)
    world, config, lora = set_up(), PRESETS[args.model], LoRA(args.rank)
    batch = any_batch(args, world)
    small = argparse.Namespace(model="tiny", batch=1, seq_len=8)
    make(PRESETS["tiny"], any_batch(small, world), world, lora=lora)()
    before = memory_bytes(world.device)
    step = make(config, batch, world, lora=lora)
    for _ in range(3):
        step()
    return memory_bytes(world.device) - before


# -------------------------------------------------------------------------------------------- loss


def measure_loss(args: argparse.Namespace) -> str:
    """Each way in a process of its own, since a process's largest size never shrinks."""
    lines = ["| loss and its backward | peak memory |", "|---|--:|"]
    for name in ("plain", "chunked"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(loss_peak, (name, args.tokens, args.dim, args.vocab_size))
        lines.append(f"| {name} | {peak / 1e9:.2f} GB |")
    return "\n".join(lines)


def loss_peak(name: str, tokens: int, dim: int, vocab_size: int) -> int:
    """Bytes that the loss of random hidden states and its gradients need beyond their inputs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = torch.randn(tokens, dim, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, dim, device=device, requires_grad=True)
    targets = torch.randint(vocab_size, (tokens,), device=device)
    before = memory_bytes(device)
    if name == "chunked":
        loss = cross_entropy_sum(hidden, weight, targets)
    else:
        loss = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    loss.backward()
    return memory_bytes(device) - before


def main() -> None:
    args = parse_args()
    measures = {
        "limit": measure_limit,
        "lora": measure_lora,
        "compare": measure_compare,
        "loss": measure_loss,
        "plan": plan_cluster,
        "comm": measure_comm,
        "step": measure_step,
    }
    result = measures[args.command](args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(result)


if __name__ == "__main__":
    run(main)
