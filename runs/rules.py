"""Check the flags of a training run, and return the configurations that they ask for."""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from data import find_token_files, tokenizer_of_token_files
from files.directories import checkpoints, describe_differences
from model import PRESETS, Llama, LlamaConfig
from parallel import STRATEGIES, ParallelConfig, Strategy
from plumbing.parser import Given
from plumbing.processes import Process, UserError
from runs.flags import MODEL_SIZES
from techniques.float8 import BLOCK, MULTIPLE, has_kernel, use_float8
from techniques.nf4 import check_blocks
from techniques.schedules import STAGES, make_schedule
from text.tokenizer import DEFAULT_TOKENIZER


def choose_model_config(args: argparse.Namespace, initial: dict | None) -> LlamaConfig:
    """Return the configuration of the --init checkpoint, or of the preset and the size flags.

    `initial` is what checkpoint.read_config returned for --init, None without it."""
    if args.model and args.model not in PRESETS:
        raise UserError(f"no model '{args.model}': choose one of {', '.join(PRESETS)}")
    sizes = {name: getattr(args, name) for name in MODEL_SIZES if getattr(args, name)}
    try:
        if not initial:
            return replace(PRESETS[args.model or "tiny"], **sizes)
        found = initial["model"]
        wanted = PRESETS[args.model] if args.model else found
        wanted = replace(wanted, vocab_size=found.vocab_size, **sizes)
    except ValueError as error:
        raise UserError(str(error))
    if wanted != found:
        differences = describe_differences(found, wanted)
        raise UserError(f"{args.init} has {differences}: leave out --model and its sizes")
    return found


def choose_tokenizer(args: argparse.Namespace, initial: dict | None) -> str:
    """Return the name of the tokenizer: --tokenizer, or that of the data or of --init."""
    if args.tokenizer:
        return args.tokenizer
    if not initial or find_token_files(args.data):
        return tokenizer_of_token_files(args.data) or DEFAULT_TOKENIZER
    if not initial["tokenizer"]:
        raise UserError(f"{initial['directory']} has no tokenizer.model: give its --tokenizer")
    return initial["tokenizer"]


def requested_parallel(args: argparse.Namespace) -> ParallelConfig:
    """Return the parallel configuration of the flags, still without `replicate` and `shard`."""
    return ParallelConfig(
        dp=args.dp,
        tp=args.tp,
        pp=args.pp,
        cp=args.cp,
        stages_per_rank=args.stages_per_rank or STAGES.get(args.schedule, 1),
        schedule=args.schedule,
        reshard=args.reshard,
        checkpointing=args.checkpointing,
        compile=args.compile,
        offload=args.offload,
        offload_activations=args.offload_activations,
        dtype=getattr(torch, args.dtype),
        optimizer=args.optimizer or "adamw",
        moments=args.moments,
        float8=args.float8,
        async_tp=args.async_tp,
    )


def check_training_flags(args: argparse.Namespace, config: LlamaConfig, process: Process) -> None:
    """Raise UserError for flags that cannot work together; the message suggests values."""
    if args.seq_len > config.max_seq_len:
        raise UserError(
            f"--seq-len {args.seq_len} exceeds the model's maximum: --seq-len {config.max_seq_len}"
        )
    # The default may exceed --steps, since everybody first tries a few.
    longest = args.steps + 1 - math.ceil(args.steps / 3)  # then the learning rate decays
    if isinstance(args.warmup, Given) and args.warmup > longest:
        raise UserError(
            f"--warmup {args.warmup} is too long for --steps {args.steps}: the learning rate would "
            f"not reach --lr; use at most --warmup {longest}"
        )
    check_parallel(requested_parallel(args), args.shard, config, process)
    check_seq_len(args.seq_len, args.cp)
    if args.seq_len // args.cp % args.tp and torch.__version__ < "2.13":  # compared as versions
        even = _round_up(args.seq_len, args.tp * 2 * args.cp if args.cp > 1 else args.tp)
        raise UserError(
            f"torch {torch.__version__} cannot shard --seq-len {args.seq_len} over --tp {args.tp}: "
            f"use --seq-len {even}, or torch 2.13, which shards unevenly"
        )
    data_ranks = process.size // (args.tp * args.pp * args.cp)
    share, rest = divmod(args.batch, data_ranks)
    if rest:
        raise UserError(
            f"--batch {args.batch} is no multiple of the {data_ranks} ranks that share it: "
            f"use --batch {_round_up(args.batch, data_ranks)}"
        )
    if args.microbatch and share % args.microbatch:
        raise UserError(
            f"--microbatch {args.microbatch} does not divide the {share} sequences of a rank "
            f"(--batch {args.batch} over {data_ranks} ranks)"
        )
    parallel, microbatches = requested_parallel(args), share // (args.microbatch or share)
    if args.pp > 1:  # the schedule is proved
        make_schedule(args.schedule, args.pp, microbatches, parallel.stages_per_rank)
    elif args.schedule != "1f1b" or args.stages_per_rank:
        raise UserError("--schedule and --stages-per-rank are for pipelines: give --pp 2 or more")
    if args.float8 != "none":
        if "targets" in args:
            raise UserError("--float8 is for train.py: with adapters, products are not in 8 bits")
        chunks = args.tp if args.async_tp else 1  # in each of which gradients are sums
        tokens = (args.microbatch or share) * math.ceil(args.seq_len // args.cp / chunks)
        check_tokens(parallel, tokens, process.device)
        with torch.device("meta"):
            use_float8(Llama(config), args.float8, args.tp)  # raises where nothing is to replace
    if args.optimizer == "muon" and "targets" in args:
        raise UserError("--optimizer muon is for whole matrices, not for adapters: leave it out")
    if getattr(args, "base_bits", 16) == 4:
        check_blocks(config, args.tp)
    if checkpoints(args.out) and not args.resume:
        raise UserError(
            f"{args.out} already holds a run: --resume continues it, or choose another --out"
        )


def check_tokens(parallel: ParallelConfig, tokens: int, device: torch.device) -> None:
    """Raise UserError if gradients of weights cannot be summed in 8 bits over the `tokens` of a
    product: those of a microbatch, or of a chunk of it. (Outputs are sums over widths.)"""
    recipe, multiple = parallel.float8, 1
    if has_kernel(device, parallel.dtype, recipe):
        multiple = MULTIPLE
    if recipe == "mxfp8":
        multiple = BLOCK
    if tokens % multiple:
        raise UserError(
            f"--float8 {recipe} sums over the {tokens} tokens of a microbatch (--async-tp: of a "
            f"chunk), which must be a multiple of {multiple}: choose --microbatch and --seq-len so"
        )


def check_seq_len(seq_len: int, cp: int) -> None:
    """Raise UserError for sequences that cannot be cut into two equal chunks for each of cp ranks.

    Padding would do, too, but all rows have seq_len tokens, so a length that can be cut costs less.
    """
    if cp > 1 and seq_len % (2 * cp):
        raise UserError(
            f"--seq-len {seq_len} cannot be cut into the {2 * cp} chunks of --cp {cp}: use "
            f"--seq-len {_round_up(seq_len, 2 * cp)}"
        )


def _round_up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple


def check_parallel(
    requested: ParallelConfig, shard: int | None, config: LlamaConfig, process: Process
) -> None:
    """Raise UserError for a configuration that these processes or this model cannot have.

    `requested.dp` may be "auto"; `shard` is the value of --shard, if given."""
    dp, tp, reshard = requested.dp, requested.tp, requested.reshard
    strategy = STRATEGIES.get(dp)  # None for auto
    fsdp_flags = _dp_flags(lambda strategy: strategy.uses_fsdp)
    if (shareable := math.gcd(config.n_kv_heads, config.ffn_dim)) % tp:
        raise UserError(
            f"--tp {tp} cannot shard {config.n_kv_heads} key/value heads and a feed-forward width "
            f"of {config.ffn_dim} evenly: --tp must divide {shareable}"
        )
    data_ranks, rest = divmod(process.size, tp * requested.pp)
    if rest:
        pp = f" x --pp {requested.pp}" if requested.pp > 1 else ""
        raise UserError(f"{process.size} processes are no multiple of --tp {tp}{pp}")
    if data_ranks % requested.cp:
        raise UserError(
            f"--cp {requested.cp} must divide the {data_ranks} ranks of data parallelism "
            f"({process.size} processes with --tp {tp} --pp {requested.pp})"
        )
    if (stages := requested.pp * requested.stages_per_rank) > config.n_layers:
        raise UserError(
            f"--pp {requested.pp} makes {stages} stages, and the model has {config.n_layers} "
            f"layers: --pp must be at most {config.n_layers // requested.stages_per_rank}"
        )
    if requested.offload and not (strategy and strategy.uses_fsdp):
        raise UserError(f"--offload is for {fsdp_flags}")
    if requested.offload and reshard == "adapters":
        raise UserError("--offload and --reshard adapters exclude each other: give one of them")
    if requested.offload_activations and requested.checkpointing == "selective":
        raise UserError(
            "--offload-activations finds nothing of what --checkpointing selective saves: use "
            "--checkpointing full or none"
        )
    if reshard in ("none", "adapters", "all") and strategy and not requested.strategy.uses_fsdp:
        raise UserError(f"--reshard {reshard} is for {fsdp_flags}: {dp} shards no weights")
    if shard and not (strategy and strategy.copy_per == "node"):
        raise UserError(f"--shard {shard} is for {_dp_flags(lambda s: s.copy_per == 'node')}")
    if shard and data_ranks % shard:
        raise UserError(
            f"--shard {shard} must divide the {data_ranks} ranks with different sequences "
            f"({process.size} processes with --tp {tp} --pp {requested.pp})"
        )


def _dp_flags(wanted: Callable[[Strategy], bool]) -> str:
    """Name the strategies that are wanted, as `--dp X or --dp Y`."""
    return " or ".join(f"--dp {name}" for name, strategy in STRATEGIES.items() if wanted(strategy))
