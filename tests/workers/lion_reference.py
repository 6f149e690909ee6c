"""Lion on one process in plain PyTorch, written independently of tests/changes/lion.patch."""

from types import SimpleNamespace

import torch
from exact import plain_model, plain_step
from workers.train_cases import STEPS, batch_of


def plain_lion(config: dict) -> dict[str, torch.Tensor]:
    """Return the weights after STEPS steps on the batch of train_cases.py."""
    model, batch = plain_model(config), batch_of(packed=False)
    named = dict(model.named_parameters())
    means = dict.fromkeys(named, 0.0)

    @torch.no_grad()
    def step() -> None:
        for name, p in named.items():
            decay = 0.1 if p.ndim == 2 else 0.0
            direction = torch.sign(0.9 * means[name] + 0.1 * p.grad)
            p.copy_(p - 1e-2 * (direction + decay * p))
            means[name] = 0.99 * means[name] + 0.01 * p.grad

    for _ in range(STEPS):
        plain_step(model(batch.tokens), batch.targets, named, SimpleNamespace(step=step))
    return {name: p.detach() for name, p in named.items()}
