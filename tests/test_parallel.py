"""parallel.py: every split computes the single-process gradient, and sends what it says."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import launch, refused, succeed
from workers.train_split import BATCH, SEQ, batch_of

from model import IGNORE, Llama, LlamaConfig, UserError
from parallel import (
    Split,
    World,
    activation_bytes,
    check_split,
    choose_split,
    recompute_and_compile,
    state_bytes,
)

# Widths that 2 and 4 do not divide, wherever a split allows it; 101 words never divide.
ODD = dict(dim=30, n_layers=2, n_heads=3, n_kv_heads=1, ffn_dim=46, vocab_size=101)
GROUPED = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=46, vocab_size=101)
FOUR = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=44, vocab_size=101)
TIED = dict(tie_embeddings=True)


def case(config: dict, microbatch: int = 0, packed: bool = False, **split) -> dict:
    options = {"microbatch": microbatch} if microbatch else {}
    return dict(config=config, packed=packed, split=split, **options)


TWO = {
    "ddp": case(ODD, dp="ddp", replicate=2),
    "ddp accumulating": case(ODD | TIED, 1, dp="ddp", replicate=2),
    "ddp selective": case(ODD, packed=True, dp="ddp", replicate=2, checkpointing="selective"),
    "ddp full": case(ODD, 1, dp="ddp", replicate=2, checkpointing="full"),
    "fsdp": case(ODD, dp="fsdp", shard=2),
    "fsdp tied": case(ODD | TIED, 1, packed=True, dp="fsdp", shard=2),
    "fsdp reshard none": case(ODD, 1, dp="fsdp", shard=2, reshard="none"),
    "fsdp reshard all": case(ODD, 1, dp="fsdp", shard=2, reshard="all"),
    "fsdp selective": case(ODD, dp="fsdp", shard=2, checkpointing="selective"),
    "fsdp full": case(ODD, 1, dp="fsdp", shard=2, checkpointing="full"),
    "fsdp offload": case(ODD, dp="fsdp", shard=2, offload=True),
    "hsdp of two replicas": case(ODD, dp="hsdp", replicate=2),
    "tp": case(GROUPED, dp="ddp", tp=2),
    "tp tied": case(GROUPED | TIED, 2, packed=True, dp="ddp", tp=2),
    "tp selective": case(GROUPED, 4, dp="ddp", tp=2, checkpointing="selective"),
    "tp full": case(GROUPED, packed=True, dp="fsdp", tp=2, checkpointing="full"),
    "fsdp compiled": case(
        ODD, 2, dp="fsdp", shard=2, checkpointing="selective", compile=True
    ),
    "tp compiled": case(GROUPED, dp="ddp", tp=2, checkpointing="full", compile=True),
}
FOURFOLD = {
    "ddp": case(ODD | TIED, packed=True, dp="ddp", replicate=4),
    "fsdp": case(ODD, 1, dp="fsdp", shard=4),
    "hsdp": case(ODD, dp="hsdp", replicate=2, shard=2),
    "hsdp tied": case(ODD | TIED, 1, packed=True, dp="hsdp", replicate=2, shard=2),
    "hsdp reshard all": case(ODD, 1, dp="hsdp", replicate=2, shard=2, reshard="all"),
    "hsdp full": case(ODD, dp="hsdp", replicate=2, shard=2, checkpointing="full"),
    "ddp tp": case(GROUPED, 1, dp="ddp", replicate=2, tp=2),
    "fsdp tp": case(GROUPED, packed=True, dp="fsdp", shard=2, tp=2),
    "fsdp tp tied": case(GROUPED | TIED, 1, dp="fsdp", shard=2, tp=2, checkpointing="selective"),
    "tp": case(FOUR | TIED, 2, packed=True, dp="fsdp", tp=4),
}
# Every combination that the tests above leave out, at the price of many compilations.
DATA = {
    "ddp": lambda n: dict(dp="ddp", replicate=n),
    "fsdp": lambda n: dict(dp="fsdp", shard=n),
    "hsdp": lambda n: dict(dp="hsdp", replicate=max(n // 2, 1), shard=min(n, 2)),
}
ALL = {
    f"{dp} tp {tp} {mode} {'compiled' if compiled else 'eager'} microbatch {microbatch}": case(
        FOUR if tp == 4 else GROUPED,
        microbatch,
        packed=compiled,
        tp=tp,
        checkpointing=mode,
        compile=compiled,
        **DATA[dp](4 // tp),
    )
    for compiled in (False, True)
    for dp in DATA
    for tp in (1, 2, 4)
    for mode in ("none", "selective", "full")
    for microbatch in (1, 2)
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of all cases on so many processes: one launch for all of them."""
    done = {}

    def run(nproc: int, cases: dict, timeout: float = 400) -> dict:
        key = nproc, len(cases)
        if key not in done:
            directory = tmp_path_factory.mktemp("split")
            (directory / "cases.json").write_text(json.dumps(list(cases.values())))
            arguments = directory / "cases.json", directory / "results.pt"
            succeed("tests/workers/train_split.py", *arguments, nproc=nproc, timeout=timeout)
            done[key] = dict(zip(cases, torch.load(arguments[1], weights_only=False)))
        return done[key]

    return run


def plain(config: dict, packed: bool) -> dict:
    """Five steps of the whole batch on one process, written out; no line of parallel.py runs."""
    model = Llama(LlamaConfig(**config)).double()
    model.init_weights(seed=3)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    decayed = [p for p in model.parameters() if p.ndim == 2]
    free = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=False, foreach=False)
    batch, rows, gradients = batch_of(packed), [], {}
    for _ in range(5):
        logits = model(batch.tokens, positions=batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), (batch.targets != IGNORE).sum().item(), norm.item()))
    assert all(norm > 0.1 for *_, norm in rows)  # so that clipping is seen to work
    return {"rows": rows, "gradients": gradients, "first": first,
            "last": dict(model.named_parameters())}  # fmt: skip


def equals_plain(result: dict, case: dict) -> None:
    expected = plain(case["config"], case["packed"])
    for ours, theirs in zip(result["rows"], expected["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    for what in ("gradients", "last"):
        assert result[what].keys() == expected[what].keys()
        for name, value in expected[what].items():
            error = (result[what][name] - value).norm() / value.norm()
            assert error < 1e-12, (what, name, error)
    for name, value in expected["first"].items():
        assert torch.equal(result["first"][name], value), name


def sends_as_predicted(result: dict, case: dict, nproc: int) -> None:
    split = Split(**case["split"])
    sizes = {"replicate": split.replicate, "shard": split.shard, "tp": split.tp}
    sums = next((dim for dim, size in sizes.items() if size == nproc), "world"), "all-gather"
    calls, nbytes = result["predicted"].get(sums, (0, 0))
    expected = result["predicted"] | {sums: (calls + 1, nbytes + nproc * 40)}  # World.gather
    assert result["sent"] == expected


def computes_once(result: dict, case: dict) -> None:
    """Attention runs forward once for each layer and microbatch; twice, where all is recomputed."""
    split = Split(**case["split"])
    parts = split.replicate * split.shard
    microbatches = BATCH // parts // case.get("microbatch", BATCH // parts)
    times = 2 if split.checkpointing == "full" else 1
    assert result["attentions"] == times * microbatches * case["config"]["n_layers"]


def compiles_once(result: dict) -> None:
    assert result["graphs"]["unique_graphs"] == 1 and not result["breaks"]


@pytest.mark.parametrize("name", TWO)
def test_two_processes_equal_one(trained, name):
    result = trained(2, TWO)[name]
    equals_plain(result, TWO[name])
    computes_once(result, TWO[name])
    if TWO[name]["split"].get("compile"):
        compiles_once(result)
    else:
        sends_as_predicted(result, TWO[name], 2)


@pytest.mark.parametrize("name", FOURFOLD)
def test_four_processes_equal_one(trained, name):
    result = trained(4, FOURFOLD)[name]
    equals_plain(result, FOURFOLD[name])
    computes_once(result, FOURFOLD[name])
    sends_as_predicted(result, FOURFOLD[name], 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_combination_equals_one_process(trained, name):
    result = trained(4, ALL, timeout=3600)[name]
    equals_plain(result, ALL[name])
    computes_once(result, ALL[name])
    if ALL[name]["split"]["compile"]:
        compiles_once(result)
    else:
        sends_as_predicted(result, ALL[name], 4)
