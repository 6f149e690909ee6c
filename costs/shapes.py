"""What follows from the shapes of a model: its elements on a rank, and the FLOPs of a token."""

import functools
import math
import re
from typing import NamedTuple

from torch import nn

from config import ParallelConfig
from model import Llama
from parallel import style_of
from techniques.parallel_layers import planned_dims


class Unit(NamedTuple):
    """What FSDP gathers at once, a block or all that is in none, on a rank along tp."""

    copies: int  # alike: as many as the rank has blocks, or 1
    trained: int  # elements
    frozen: int  # bytes
    gathered: int  # bytes to compute with: trained elements rounded, frozen ones if sharded
    kind: str = ""  # "expert_": it is sharded over mesh dimensions with this before their names


@functools.lru_cache(256)
def shapes_on_rank(
    module: nn.Module, path: str, tp: int
) -> list[tuple[nn.Parameter, list[int], bool]]:
    """Return the parameters of the module at `path` of a model, each with its shape on one of `tp`
    ranks, and whether that is the whole. Raises UserError for one that PLAN does not cover."""
    found = {}  # a tied matrix is one parameter
    for below, layer in module.named_modules():
        place = ".".join(filter(None, (path, below)))
        dims = planned_dims(style_of(place), place, layer) if tp > 1 else {}
        for name, parameter in layer.named_parameters(recurse=False):
            shape, dim = list(parameter.shape) or [1], dims.get(name)
            if dim is not None:
                shape[dim] = math.ceil(shape[dim] / tp)
            found[parameter] = parameter, shape, dim is None
    return [*found.values()]


@functools.lru_cache(4096)
def elements(module: nn.Module, path: str, tp: int, w: int, shards: int) -> tuple[int, int]:
    """Return the trained elements of a module on a rank along tp, and the bytes of its frozen ones:
    `w` each, if it is no code of one byte. FSDP pads rows to a multiple of `shards`."""
    trained = frozen = 0
    for parameter, (rows, *columns), _ in shapes_on_rank(module, path, tp):
        n = math.ceil(rows / shards) * shards * math.prod(columns)
        if parameter.requires_grad:
            trained += n
        else:
            frozen += n * (w if parameter.is_floating_point() else 1)
    return trained, frozen


def units(part: Llama, parallel: ParallelConfig, shards: int) -> list[Unit]:
    """Return the root of a rank's part of a model, and its blocks, which are taken to be alike;
    under --ep also the experts of the blocks."""
    size = parallel.tp, parallel.weight_bytes, shards
    L, (number, block) = len(part.layers), next(iter(part.layers.items()))
    each, each_frozen = elements(block, f"layers.{number}", *size)
    whole, whole_frozen = elements(part, "", *size)
    root, root_frozen = whole - L * each, whole_frozen - L * each_frozen

    def unit(copies: int, trained: int, frozen: int, kind: str = "") -> Unit:
        gathered_frozen = 0 if parallel.reshard == "adapters" else frozen
        gathered = trained * parallel.weight_bytes + gathered_frozen
        return Unit(copies, trained, frozen, gathered, kind)

    experts = []
    if parallel.ep > 1:  # and not over tp and shard
        place = block.feed_forward.experts, f"layers.{number}.feed_forward.experts"
        inside, inside_frozen = elements(*place, *size)
        each, each_frozen = each - inside, each_frozen - inside_frozen
        size = parallel.ep, parallel.weight_bytes, parallel.expert_shard
        experts = [unit(L, *elements(*place, *size), "expert_")]
    return [unit(1, root, root_frozen), unit(L, each, each_frozen), *experts]


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
            of_adapter = (p for name, p in layer.named_parameters() if name.startswith("lora_"))
            weights += 6 * sum(p.numel() for p in of_adapter)
        elif hasattr(layer, "used"):  # of its stacked matrices, by a token
            per_weight = 6 if layer.weight.requires_grad else 4
            weights += per_weight * layer.used * layer.weight[0].numel()
    return weights + 3 * 4 * config.n_layers * config.q_dim * seq_len


# Dense peaks in bfloat16, FLOP/s. The first name that matches counts. Those of them that multiply
# in 8 bits reach twice as much there, by the same data sheets.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,  # of one of its two dies: torch counts each as a device
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by its name, None if it is not known: MFU is never guessed."""
    for name, peak in PEAK_FLOPS.items():
        # "RTX 4090 Laptop" and "RTX 4090 D" are slower than what the table means.
        if re.search(rf"\b{name}\b(?! (Laptop|D\b))", device_name):
            return peak
    return None
