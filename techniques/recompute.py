"""Activation checkpointing: forward saves less, and backward computes it again.

               elements saved per token and block                        attention forwards
    none       6 D + 2 KV E + 3 F                                        1
    selective  3 D + KV E + F: the block's input, the outputs of         1
               attention, wk, wo and w3
    full       D: the block's input                                      2

Letters as in model.py. Uncompiled, `none` saves F more, silu(gate), and on a CPU 2 D more, what two
norms multiply by their weights.

Full costs another forward, a third more FLOPs, and no communication under FSDP, since backward
all-gathers the weights anyway; under tensor parallelism it repeats 2 L all-gathers and L
reduce-scatters of forward. Selective repeats three of the seven products, wq, wv and w1, and the
2 L all-gathers.
Use when activations do not fit. Avoid when they fit with a smaller microbatch.
The compiler's activation_memory_budget chooses what a compiled block saves, to fit a given share of
its memory. Here there are only these three levels.

torch.compile is applied here too, since the order of the two matters.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model import Block, Llama
from plumbing.processes import UserError
from techniques.technique import Technique

# Operators that end a matrix product (all_to_all_single: async TP's). Techniques add their own.
PRODUCTS = {"mm", "addmm", "bmm", "_scaled_mm", "all_to_all_single"}


def recompute_and_compile(model: Llama, checkpointing: str, compile: bool) -> None:
    """Apply activation checkpointing and torch.compile to each block, by replacing its forward.

    Parameters keep their names, and FSDP's all-gather stays outside. Full checkpointing calls the
    compiled block a second time; selective goes inside, where the compiler sees what to save. One
    graph serves all blocks; but the input of block 0 above a frozen embedding needs no gradient, so
    it has a graph of its own.
    Each input shape has its own graph (dynamic shapes would confuse DTensor).
    Use compile for long runs: it fuses what lies between the matrix products, after a slow start.
    """
    if compile:
        torch._dynamo.config.optimize_ddp = False  # it would break graphs at DDP's buckets
        torch._dynamo.config.recompile_limit = 64  # packed documents have several shapes
    for name, block in model.layers.items():
        if not isinstance(block, Block) or "forward" in vars(block):
            raise UserError(
                f"block {name} is wrapped already: a checkpoint within a checkpoint would compute "
                f"attention three times; give parallelize() a model as it was built"
            )
        if compile and checkpointing == "full":
            block.forward = torch.compile(block.forward, dynamic=False)
        if checkpointing == "selective":
            for module in block.modules():
                for layer in getattr(module, "saved_products", ()):
                    if not hasattr(module, layer):
                        raise UserError(
                            f"{type(module).__name__} has no {layer}, which its saved_products "
                            f"names: leave it out there, or give --checkpointing full"
                        )
                    mark_products(getattr(module, layer))
        if checkpointing != "none":
            block.forward = recompute(block.forward, selective=checkpointing == "selective")
        if compile and checkpointing != "full":
            block.forward = torch.compile(block.forward, dynamic=False)


def recompute(forward: Callable, selective: bool) -> Callable:
    """Return a forward that runs again in backward (labs/recompute writes it by hand)."""
    context = {"context_fn": _selective_context} if selective else {}
    return partial(checkpoint, forward, use_reentrant=False, **context)


def mark_products(layer: nn.Module) -> None:
    """Run aten.alias, which computes nothing, before each matrix product of the layer, as a mark:
    the policy below sees operators, in compiled blocks too, but not the layers they belong to."""
    if hasattr(layer, "saves_chunks"):  # it marks the product of each chunk itself (async_tp.py)
        layer.saves_chunks = True
    else:
        layer.register_forward_pre_hook(lambda _, inputs: (torch.ops.aten.alias(inputs[0]),))


def is_attention(operator: str) -> bool:
    """Return whether an operator is a forward of attention; its kernels differ between devices."""
    is_forward = not operator.removesuffix(".default").endswith("_backward")
    return is_forward and ("scaled_dot_product" in operator or "varlen_attn" in operator)


def _selective_context():
    """Save attention and the products of the layers that a module names in `saved_products`; LoRA's
    thin products are computed again. Under tensor parallelism also save what each reduce-scatter
    returns."""
    marked = {}  # is_recompute -> whether a mark came since the last product

    def policy(context, op, *args, **kwargs):
        name = op.__name__
        if name == "alias.default":
            marked[context.is_recompute] = True
        is_saved = False
        if name.removesuffix(".default") in PRODUCTS:
            is_saved = marked.pop(context.is_recompute, False)
        if is_saved or is_attention(name) or "reduce_scatter" in name:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply(model: Llama, world) -> None:
    recompute_and_compile(model, world.parallel.checkpointing, world.parallel.compile)


def suggests(facts) -> str:
    """Advise to remove a checkpoint of the model's own, or to checkpoint less where that fits."""
    kind = facts.parallel.checkpointing
    needed = 2 if kind == "full" else 1
    if facts.attentions > needed:
        return (
            f"attention runs forward {facts.attentions:g} times a layer and microbatch, and "
            f"--checkpointing {kind} needs {needed}: the model has one more checkpoint"
        )
    for weaker in ("none", "selective"):
        if weaker != kind and (note := facts.fit_note(checkpointing=weaker)):
            return facts.takes(
                "recompute", "recomputes activations", f"--checkpointing {weaker} {note}"
            )
    return ""


TECHNIQUE = Technique("", apply, suggests=suggests)  # also without checkpointing, for --compile
