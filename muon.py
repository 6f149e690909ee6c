"""Muon, an optimizer for matrices (Jordan 2024, kellerjordan.github.io/posts/muon).

AdamW treats a matrix as a list of numbers. But in the gradient of a matrix a few directions, which
most tokens share, are far larger than all others. Muon makes all directions of an update nearly
equally long: of its singular value decomposition U S Vᵀ it takes U Vᵀ. So what is rare in the text
is learnt too.

    gradient ── momentum ── orthogonalize: U S Vᵀ -> U Vᵀ ── scale ── weight

That is for the matrices of the blocks. AdamW updates all others, with the same learning rate: rows
of embedding and output belong to single tokens, and norms are not matrices. The state of a matrix
is one number for each weight, where AdamW has two.

A shard of a matrix cannot be orthogonalized alone: a rank all-gathers the update over the ranks
that share the matrix, orthogonalizes the whole, and keeps its part. So FSDP, ZeRO-1 and tensor
parallelism send the matrices' bytes once more a step, and DDP sends no more than before. Every rank
orthogonalizes all matrices of its layers, so replicas stay equal only where ranks round alike: on
devices of one kind, with as many threads. On many ranks it would be faster if each did only some.
"""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from plumbing.shards import assign_shard

MOMENTUM = 0.95
# The Newton-Schulz iteration with Jordan's coefficients: singular values that start between 0.003
# and 1 are between 0.68 and 1.2 after five steps, which is near enough; smaller ones stay smaller.
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, AdamW for all other parameters.

    groups: as for any optimizer, but of (name, parameter); each has its own weight_decay"""

    def __init__(self, groups, lr: float, betas: tuple[float, float], eps: float = 1e-8):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            others = []
            for name, parameter in zip(group["param_names"], group["params"]):
                if not is_block_matrix(name, parameter):
                    others.append(parameter)
                    continue
                update = self.advance(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update, alpha=group["lr"])
            if others:
                self.update_by_adamw(others, group)

    def advance(self, parameter: Tensor) -> Tensor:
        """Advance the momentum of a matrix, and return what to subtract for a learning rate of 1.

        Its numbers have a root mean square of 0.1. Liu et al. 2025 (arXiv:2502.16982) take 0.2, as
        AdamW's updates have; with the same learning rate for both, 0.1 was better here."""
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(momentum, MOMENTUM)  # Nesterov's: the momentum one step ahead
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        # U Vᵀ of m rows and n columns has a root mean square of 1 / sqrt(max(m, n)).
        assign_shard(update, 0.1 * math.sqrt(max(whole.shape)) * orthogonalize(whole))
        return update

    def update_by_adamw(self, parameters: list[Tensor], group: dict) -> None:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        keys = "exp_avg", "exp_avg_sq", "step"
        means, squares, steps = ([self.state[p][key] for p in parameters] for key in keys)
        beta1, beta2 = group["betas"]
        settings = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        settings |= dict(beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, fused=True)
        gradients = [parameter.grad for parameter in parameters]
        adamw(parameters, gradients, means, squares, [], steps, **settings)


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon takes the parameter of this name, or AdamW."""
    return name.startswith("layers.") and parameter.ndim == 2


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return U Vᵀ of a matrix U S Vᵀ, nearly. The matrix is divided by its norm, the root of the
    sum of all s²; then, five times, each singular value s becomes A s + B s³ + C s⁵. In bfloat16 on
    a GPU, where that is many times faster."""
    x = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    if len(x) > x.shape[1]:
        return orthogonalize(x.T).T.type_as(matrix)  # with the smaller of the two gram matrices
    x = x / x.norm().clamp(min=1e-30)
    for _ in range(ITERATIONS):
        gram = x @ x.T  # U S² Uᵀ
        polynomial = torch.addmm(gram, gram, gram, beta=B, alpha=C)  # B gram + C gram²
        x = torch.addmm(x, polynomial, x, beta=A)  # A x + polynomial x
    return x.type_as(matrix)
