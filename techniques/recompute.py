"""Activation checkpointing: forward saves less, and backward computes it again.

    level      elements saved for a token in a block                     products computed again
    none       6 D + 2 KV E + 3 F                                        none
    products   4 D + 2 KV E + 2 F: the block's input, attention's        none
               output, and the output of each linear layer but w2
    selective  3 D + KV E + F: the same without wq, wv and w1            wq wv w1
    full       D: the block's input; with --compile attention's output   all but w2

Letters as in model.py, for H E = D and without experts. Uncompiled, `none` also saves silu(gate), F
elements, and on a CPU the normalized x of both norms, 2 D elements. Without --compile, `full` also
computes attention twice.

Under FSDP recomputation sends nothing more, since backward all-gathers the weights anyway. Under
tensor parallelism it repeats the 2 L all-gathers of forward and, with full in uncompiled blocks, L
reduce-scatters. Norms, RoPE and SwiGLU are computed again at each level but none: that is fast.
Use when activations do not fit: take the first level with which they do. Avoid when they fit with a
smaller microbatch.
torch.compile can choose by itself what to save, within the share of memory that its setting
activation_memory_budget allows. Here there are only these levels.

This file also applies torch.compile, since the order of compiling and checkpointing matters.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from model import Block, Llama
from plumbing.host_reads import keeping_reads
from plumbing.messages import UserError
from techniques.technique import PRODUCTS, Technique

# Selective checkpointing expects the operators of forward again in a recomputation. Let it ignore
# FSDP's marks for profilers, of which a recomputation has fewer.
SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_enter_new.default)
SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_exit._RecordFunction)

# Operators whose small results are saved: float8.py's, and topk, a choice that has to stay.
SMALL_RESULTS = "amax", "all_reduce", "topk"


def recompute_and_compile(model: Llama, checkpointing: str, compile: bool, eager=False) -> None:
    """Apply activation checkpointing and torch.compile to each block, by replacing its forward.
    `eager` blocks stay uncompiled.

    So parameters keep their names, and FSDP's all-gather stays outside of forward. The compiled
    function contains the checkpoint: so the compiler sees what to save, and does not compute again
    what backward does not need. All blocks have one graph for each input shape (dynamic shapes
    would confuse DTensor). Above a frozen embedding block 0 has another, since its input needs no
    gradient. Use compile for long runs: it starts slowly, and fuses what is no matrix product.
    """
    if compile:
        torch._dynamo.config.optimize_ddp = False  # it would break graphs at DDP's buckets
        torch._dynamo.config.recompile_limit = 64  # packed documents have several shapes
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # blocks have other hooks
    is_compiled = compile and not eager
    for name, block in model.layers.items():
        if not isinstance(block, Block) or "forward" in vars(block):
            raise UserError(
                f"block {name} is no Block of model.py, or is wrapped already, and a checkpoint "
                f"within a checkpoint computes attention three times: derive your block from "
                f"model.Block, and give parallelize() a model as it was built"
            )
        if checkpointing in ("products", "selective"):
            for module in block.modules():
                for layer in saved_layers(module, all_products=checkpointing == "products"):
                    mark_products(layer)
        if checkpointing != "none":
            # With --compile, "full" has a policy, too, which saves attention's output. Else the
            # compiler would save a random state in its place, and compute attention again.
            selective = compile or checkpointing != "full"
            block.forward = recompute(block.forward, selective, is_compiled)
        if is_compiled:
            block.forward = torch.compile(block.forward, dynamic=False)


def recompute(forward: Callable, selective: bool, is_compiled: bool = False) -> Callable:
    """Return a forward that runs again in backward (labs/recompute writes it by hand)."""
    contexts = _selective_contexts if selective else noop_context_fn
    if not is_compiled:
        contexts = partial(keeping_reads, contexts)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def saved_layers(module: nn.Module, all_products: bool) -> list[nn.Module]:
    """Return the layers of a module whose outputs are saved: its `saved_products` and, if
    `all_products`, its other linear layers but w2, whose output is only added to the stream."""
    names = list(getattr(module, "saved_products", ()))
    for name in names:
        if not hasattr(module, name):
            raise UserError(
                f"{type(module).__name__} has no {name}, which its saved_products names: leave it "
                f"out there, or give --checkpointing full"
            )
    if all_products:
        others = {*names, *getattr(module, "writes_to_stream", ())}
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear) and name not in others:
                names.append(name)
    return [getattr(module, name) for name in names]


def mark_products(layer: nn.Module) -> None:
    """Let aten.alias, which computes nothing, run before the layer's matrix product. The policy
    below sees operators but not their layers, and takes this operator for a mark."""
    if hasattr(layer, "saves_chunks"):  # it marks the product of each chunk itself (async_tp.py)
        layer.saves_chunks = True
    else:
        layer.register_forward_pre_hook(lambda _, inputs: (torch.ops.aten.alias(inputs[0]),))


def is_attention(operator: str) -> bool:
    """Return whether an operator is attention in forward. Its name depends on the device."""
    is_forward = not operator.removesuffix(".default").endswith("_backward")
    return is_forward and ("scaled_dot_product" in operator or "varlen_attn" in operator)


def _selective_contexts():
    """Save the outputs of attention, of each reduce-scatter (tensor parallelism) and of the layers
    that are marked, but not of LoRA's thin products; the experts that a router has chosen; in 8
    bits, the largest element of each tensor or row, which backward need not find again."""
    has_mark = {}  # context.is_recompute -> True from a mark to the next product

    def policy(context, op, *args, **kwargs):
        name = op.__name__
        if name == "alias.default":
            has_mark[context.is_recompute] = True
        is_saved = False
        if name.removesuffix(".default") in PRODUCTS:
            is_saved = has_mark.pop(context.is_recompute, False)
        is_saved |= name.startswith(SMALL_RESULTS)
        if is_saved or is_attention(name) or "reduce_scatter" in name:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply(model: Llama, world) -> None:
    parallel = world.parallel
    eager = stays_uncompiled(model, world)
    recompute_and_compile(model, parallel.checkpointing, parallel.compile, eager)


def stays_uncompiled(model: Llama, world) -> bool:
    """Return whether --compile has to leave blocks uncompiled. The compiler divides a graph around
    what it must not compile, but it cannot divide a checkpoint."""
    if world.parallel.checkpointing == "none":
        return False
    may_vary = not world.parallel.fixes_shapes(world.device.type == "cuda")
    for module in model.modules():
        if hasattr(type(module).forward, "_torchdynamo_disable"):
            return True
        if may_vary and hasattr(module, "shapes_vary"):
            return True
        if not getattr(module, "has_kernel", True):
            return True
    return False


def about(model: Llama, world) -> str:
    if world.parallel.compile and stays_uncompiled(model, world):
        return "blocks are not compiled (with --checkpointing none, most of each would be)"
    return ""


def suggests(facts) -> str:
    """Advise to remove a checkpoint that the model itself has, or a level that recomputes less."""
    kind = facts.parallel.checkpointing
    needed_runs = 2 if facts.parallel.repeats_attention else 1
    if facts.attentions > needed_runs:
        return (
            f"attention runs forward {facts.attentions:g} times a layer and microbatch, and "
            f"--checkpointing {kind} needs {needed_runs}: the model has one more checkpoint"
        )
    for other_kind in ("none", "products", "selective"):
        if other_kind == kind:  # those that follow recompute more
            break
        if note := facts.fit_note(checkpointing=other_kind):
            return facts.takes(
                "recompute", "recomputes activations", f"--checkpointing {other_kind} {note}"
            )
    return ""


# Always used: it also applies --compile.
TECHNIQUE = Technique("", apply, about=about, suggests=suggests)
