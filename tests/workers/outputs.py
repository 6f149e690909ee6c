"""Save what a small float64 model computes on one process: outputs.py GIVEN RESULTS.

GIVEN has the model's "config" and "batches" of tokens, targets and positions. RESULTS has the
"weights"; for each batch the "loss", its "gradients", and the loss in "validation"; and the logits
of a row at the ends of PARTS, computed at once ("full") and with a cache ("cached")."""

import sys

import torch

from files.published import with_fixed_weights
from model import KVCache, Llama, LlamaConfig

PARTS = (5, 1, 4, 1, 2)  # tokens that join the cache together


def losses(model: Llama, batch: tuple) -> dict:
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    with torch.no_grad():
        validation = model(*batch)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.item(), "validation": validation.item(), "gradients": gradients}


@torch.no_grad()
def logits(model: Llama, tokens: torch.Tensor) -> dict:
    positions, cache, cached = torch.arange(tokens.shape[1])[None], KVCache(), []
    for part, where in zip(tokens.split(PARTS, 1), positions.split(PARTS, 1)):
        cached.append(model(part, positions=where, cache=cache))
    ends = torch.tensor(PARTS).cumsum(0) - 1
    return {"full": model(tokens)[:, ends], "cached": torch.cat(cached, 1)}


if __name__ == "__main__":
    given = torch.load(sys.argv[1])
    model = with_fixed_weights(Llama(LlamaConfig(**given["config"])).double())
    results = {"weights": {name: p.detach() for name, p in model.named_parameters()}}
    results["batches"] = {key: losses(model, batch) for key, batch in given["batches"].items()}
    torch.save(results | logits(model, given["batches"][False][0][:1]), sys.argv[2])
