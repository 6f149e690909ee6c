"""What follows from the shapes of a model: its elements on a rank, and the FLOPs of a token."""

import functools
import math
from typing import NamedTuple

from torch import nn

from config import ParallelConfig
from model import Llama


class Unit(NamedTuple):
    """What FSDP gathers at once, a block or all that is in none, on a rank along tp."""

    copies: int  # alike: as many as the rank has blocks, or 1
    trained: int  # elements
    frozen: int  # bytes
    gathered: int  # bytes to compute with: trained elements rounded, frozen ones if sharded


@functools.lru_cache(4096)
def elements(module: nn.Module, tp: int, w: int, shards: int) -> tuple[int, int]:
    """Return the trained elements of a module, and the bytes of its frozen ones, on one of `tp`
    ranks, which share its matrices. FSDP pads rows to a multiple of `shards`. A frozen number takes
    `w` bytes, if it is no code of one byte."""
    trained = frozen = 0
    for parameter in module.parameters():
        rows, *columns = parameter.shape or (1,)
        n = math.ceil(rows / shards) * shards * math.prod(columns)
        n = math.ceil(n / tp) if columns else n  # vectors are replicated
        if parameter.requires_grad:
            trained += n
        else:
            frozen += n * (w if parameter.is_floating_point() else 1)
    return trained, frozen


def units(part: Llama, parallel: ParallelConfig, shards: int) -> tuple[Unit, Unit]:
    """Return the root of a rank's part of a model, and its blocks, which are taken to be alike."""
    tp, w = parallel.tp, parallel.weight_bytes
    L, block = len(part.layers), next(iter(part.layers.values()))
    (whole, whole_frozen), (each, each_frozen) = (
        elements(module, tp, w, shards) for module in (part, block)
    )
    root, root_frozen = whole - L * each, whole_frozen - L * each_frozen
    gathers_frozen = 0 if parallel.reshard == "adapters" else 1
    return (
        Unit(1, root, root_frozen, root * w + root_frozen * gathers_frozen),
        Unit(L, each, each_frozen, each * w + each_frozen * gathers_frozen),
    )


def flops_per_token(model: Llama, seq_len: int) -> int:
    """Return the floating-point operations to train on one token.

    Per weight of a matrix: 2 in forward, 2 in backward for the gradient of the input and, if it is
    trainable, 2 for its own gradient. Attention takes 4 H E per layer and token attended to, for
    scores and weighted sums, and three times as much with backward. As usual (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B), causal attention is counted as if each token attended to
    seq_len tokens, and recomputation is not counted, so that published figures compare.
    In 8 bits products are faster, so that the share of the bfloat16 peak may exceed 100 %."""
    config, weights = model.config, 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            per_weight = 6 if layer.weight.requires_grad else 4
            weights += per_weight * layer.in_features * layer.out_features
            others = [p for p in layer.parameters() if p is not layer.weight and p.requires_grad]
            weights += 6 * sum(p.numel() for p in others)  # of adapters
    return weights + 3 * 4 * config.n_layers * config.q_dim * seq_len
