"""Lion on one process in plain PyTorch, written independently of tests/changes/lion.patch."""

import torch
import torch.nn.functional as F
from torch import Tensor
from workers.train_cases import STEPS, batch_of, initialize

from model import IGNORE, Llama, LlamaConfig


def plain_lion(config: dict) -> dict[str, Tensor]:
    """Return the weights after STEPS steps on the batch of train_cases.py."""
    model = Llama(LlamaConfig(**config)).double()
    initialize(model)
    means = {name: 0.0 for name, _ in model.named_parameters()}
    batch = batch_of(packed=False)
    for _ in range(STEPS):
        logits = model(batch.tokens, positions=batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                decay = 0.1 if p.ndim == 2 else 0.0
                direction = torch.sign(0.9 * means[name] + 0.1 * p.grad)
                p.copy_(p - 1e-2 * (direction + decay * p))
                means[name] = 0.99 * means[name] + 0.01 * p.grad
    return {name: p.detach() for name, p in model.named_parameters()}
