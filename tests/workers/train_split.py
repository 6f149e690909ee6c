"""Run by torchrun: five training steps of each case that the JSON file of the first argument lists.

A case has "split" (fields of Split), "config" (of LlamaConfig), "microbatch", "packed", "dtype",
and for adapters "lora" (fields of LoRA); those are trained with a tenth of the learning rate.
Saves to the file of the second argument what the tests compare: losses, norms, the first step's
gradients, first and last weights, what was sent and what was predicted, and attention forwards."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from cost import predict_traffic
from data import Batch
from lora import LoRA, adapt_loss, adapters, add_adapters, gather_adapters, init_adapters
from measure import Counted
from model import IGNORE, Llama, LlamaConfig
from parallel import Split, arrange, parallelize, put_shard, run, set_up
from train import make_optimizer, train_step

BATCH, SEQ, VOCAB = 8, 13, 101


def batch_of(packed: bool) -> Batch:
    """Rows with 1 to 13 targets; packed, with documents of 4 and 9 tokens."""
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for row in range(BATCH):
        targets[row, 1 + 12 * row // 7 :] = IGNORE
    positions = torch.tensor([[*range(4), *range(9)]] * BATCH) if packed else None
    return Batch(tokens[:, :-1].contiguous(), targets, positions, text_bytes=1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def profiled_attentions(profile: torch.profiler.profile) -> int:
    return sum(
        event.count
        for event in profile.key_averages()
        if "scaled_dot_product" in event.key and not event.key.endswith("backward")
    )


@torch.no_grad()
def fill(model: Llama) -> None:
    """As after training a while: B is no longer zero, or A would have no gradient."""
    model.init_weights(seed=3, put=put_shard)
    init_adapters(model, seed=4, put=put_shard)
    for name, parameter in adapters(model).items():
        if name.endswith("lora_B"):
            torch.manual_seed(len(name) + sum(map(ord, name)))
            put_shard(parameter, torch.randn(parameter.shape, dtype=torch.float64) / 10)


def train(world, case: dict) -> dict:
    dtype = getattr(torch, case.get("dtype", "float64"))
    world = arrange(world, Split(**case["split"], dtype=dtype))
    with torch.device("meta"):
        model = Llama(LlamaConfig(**case["config"]))
        if "lora" in case:
            add_adapters(model, LoRA(**case["lora"]))
    parts = world.data_size
    microbatch = case.get("microbatch", BATCH // parts)
    predicted = predict_traffic(model, world.split, BATCH // parts // microbatch, microbatch, SEQ)
    runner = parallelize(model, world, fill)
    adapt_loss(model)
    first = {name: whole(p) for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, 1e-3 if "lora" in case else 1e-2, 0.1)
    gradients = {}

    def keep(optimizer, args, kwargs):
        learning = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        gradients.update({name: whole(p.grad) for name, p in learning})

    batch = batch_of(case.get("packed", False))
    share = slice(world.data_rank * BATCH // parts, (world.data_rank + 1) * BATCH // parts)
    positions = None if batch.positions is None else batch.positions[share]
    mine = Batch(batch.tokens[share], batch.targets[share], positions, 1)
    rows = []
    # A mode would make compiled blocks run eagerly; the profiler counts what is merely asked for.
    compiled = world.split.compile
    measure = torch.profiler.profile() if compiled else Counted(world)
    for step in range(1, 6):
        hook = optimizer.register_step_pre_hook(keep) if step == 1 else None
        with measure if step == 5 else nullcontext():
            totals = train_step(runner, optimizer, mine, microbatch, 0.1, world, step)
        if hook:
            hook.remove()
        rows.append((totals.mean_loss, totals.tokens, totals.grad_norm))
    with Counted(world) as saving:
        gathered = gather_adapters(model)
    return {
        "rows": rows,
        "saving": sum(nbytes for _, nbytes in saving.sent.values()),
        "adapters": gathered,
        "gradients": gradients,
        "first": first,
        "last": {name: whole(p) for name, p in model.named_parameters()},
        "sent": None if compiled else measure.sent,
        "predicted": predicted,
        "ranks": {dim: world.mesh[dim].mesh.tolist() for dim in world.mesh.mesh_dim_names},
        "attentions": profiled_attentions(measure) if compiled else measure.attentions,
        "graphs": dict(torch._dynamo.utils.counters["stats"]),
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
    }


def main():
    world = set_up()
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for case in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results.append(train(world, case))
        if world.rank == 0:
            print(f"{len(results)}/{len(cases)} {case}", file=sys.stderr, flush=True)
    if world.rank == 0:
        torch.save(results, sys.argv[2])


if __name__ == "__main__":
    run(main)
