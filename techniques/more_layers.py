"""More styles of tensor parallelism, for layers that other models than Llama have.

A file of models/ gives them to its layers in `plan`: a matrix that multiplies each token by itself,
features that are gathered where they are few, a norm over all heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ParallelStyle

from plumbing.shards import shard_parameters, to_local
from techniques.parallel_layers import (
    COLUMNS,
    REPLICATED,
    gather,
    local_operand,
    sharded_by_tokens,
)


class OwnTokens(ParallelStyle):
    """Replicate the matrix of a linear layer; each rank multiplies its tokens alone. x [B, T, in]
    is sharded by tokens, or a plain tensor of this rank's tokens; so is what is returned."""

    weight_dim = None

    def _apply(self, layer: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        shard_parameters(layer, mesh, self.weight_dim)
        product = getattr(layer, "product", F.linear)  # an adapter's computes more

        def on_local_tokens(x, *operands):
            y = product(to_local(x), *map(local_operand, operands))
            if not isinstance(x, DTensor):
                return y
            return sharded_by_tokens(y, mesh, x.shape[1])

        if hasattr(layer, "product"):
            layer.product = on_local_tokens
        else:
            layer.forward = lambda x: on_local_tokens(x, layer.weight, layer.bias)
        return layer


class GatheredColumns(ParallelStyle):
    """COLUMNS for a layer whose input is sharded by tokens, which it gathers itself. (torch's style
    would gather, too, but views of what it gathers lose gradients: LoRA takes one.)"""

    weight_dim = 0

    def _apply(self, layer: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        layer.register_forward_pre_hook(gather)
        return COLUMNS._apply(layer, mesh)


class GatherFeatures(ParallelStyle):
    """For a module that is given a rank's tokens, and whose layers gather what they need of others:
    let its `all_tokens` all-gather features that each rank needs whole."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def all_tokens(features: DTensor) -> Tensor:
            whole = features.redistribute(placements=[REPLICATED])
            return whole.to_local(grad_placements=[Partial()])

        module.all_tokens = all_tokens
        return module


class SharedNorm(ParallelStyle):
    """Shard a norm over features that ranks divide, such as one over all heads. Ranks sum up the
    squares of a token's features, one number for each token, and in backward its gradient: two
    all-reduces. x [B, T, features / tp] is a plain tensor, and so is what is returned."""

    weight_dim = 0
    sums = 1  # numbers of a token that ranks sum up

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        shard_parameters(module, mesh, self.weight_dim)

        def forward(x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            squares = wide.square().sum(-1, keepdim=True)  # [B, T, 1], of this rank's features
            squares = DTensor.from_local(squares, mesh, [Partial()])
            squares = squares.full_tensor(grad_placements=[Partial()])
            width = x.shape[-1] * mesh.size()
            normed = wide * (squares / width + module.eps).rsqrt()
            return (normed * to_local(module.weight)).type_as(x)

        module.forward = forward
        return module
