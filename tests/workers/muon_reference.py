"""Muon on whole matrices in one process, written independently of techniques/optimizers.py.

Newton-Schulz maps each singular value s of a matrix to a polynomial of s and leaves the singular
vectors as they are. So the reference takes the singular value decomposition.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from workers.train_cases import STEPS, batch_of, initialize

from model import IGNORE, Llama, LlamaConfig


def orthogonalized(x: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def plain_muon(config: dict, packed: bool = False) -> dict[str, Tensor]:
    """Return the weights after STEPS steps on the batch of train_cases.py, in plain PyTorch."""
    model = Llama(LlamaConfig(**config)).double()
    initialize(model)
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if n.startswith("layers.") and p.ndim == 2}
    others = [p for name, p in named.items() if name not in matrices]
    groups = [
        {"params": [p for p in others if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=False, foreach=False)
    buffers = {name: torch.zeros_like(p) for name, p in matrices.items()}
    batch = batch_of(packed)
    for _ in range(STEPS):
        logits = model(batch.tokens, positions=batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 0.1)
        adamw.step()
        with torch.no_grad():
            for name, p in matrices.items():
                buffers[name] = 0.95 * buffers[name] + p.grad
                direction = orthogonalized(p.grad + 0.95 * buffers[name])
                p.copy_(p - 1e-2 * (0.1 * p + 0.1 * max(p.shape) ** 0.5 * direction))
    return {name: p.detach() for name, p in named.items()}
