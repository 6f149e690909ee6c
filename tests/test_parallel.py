"""parallel.py, parallel.py: every configuration computes the gradient of one process, and
communicates what costs/traffic.py predicts."""

import functools
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import step_of, succeed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from workers.train_cases import BATCH, STEPS, batch_of, build, initialize

from costs.memory import predict_memory
from generate import generate
from model import IGNORE, Attention, Block, FeedForward, Llama, LlamaConfig, rope_angles
from parallel import STRATEGIES, ParallelConfig, parallelize, tensor_parallel
from perf.instruments import build_on_meta
from plumbing.processes import UserError
from runs.check_model import check_equal_replicas
from techniques.nf4 import dequantized
from techniques.recompute import recompute_and_compile

# Widths that 2 and 4 do not divide where that is possible; a vocabulary of 101 never divides.
ODD = dict(dim=30, n_layers=2, n_heads=3, n_kv_heads=1, ffn_dim=46, vocab_size=101)
GROUPED = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=46, vocab_size=101)
FOUR = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=44, vocab_size=101)
TIED = dict(tie_embeddings=True)
SEVEN = dict(rank=3, alpha=5)
RSLORA = dict(rank=4, alpha=8, rslora=True)


def case(
    config: dict, microbatch: int = 0, packed: bool = False, lora: dict | None = None, **parallel
) -> dict:
    options = {"microbatch": microbatch} if microbatch else {}
    options |= {"lora": lora} if lora else {}
    return dict(config=config, packed=packed, parallel=parallel, **options)


def beside(targets: str) -> dict:
    """LoRA on these matrices only: backward ends at the first of them."""
    return dict(rank=2, alpha=64, targets=targets.split())


TWO = {
    "ddp in buckets": case(ODD | dict(dim=240, ffn_dim=1400), dp="ddp", replicate=2),
    "ddp": case(ODD, dp="ddp", replicate=2),
    "ddp accumulating": case(ODD | TIED, 1, dp="ddp", replicate=2),
    "ddp selective": case(ODD, packed=True, dp="ddp", replicate=2, checkpointing="selective"),
    "ddp full": case(ODD, 1, dp="ddp", replicate=2, checkpointing="full"),
    "zero1": case(ODD, dp="zero1", replicate=2),
    "zero1 accumulating": case(ODD | TIED, 1, packed=True, dp="zero1", replicate=2),
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
    "tp reshard all": case(GROUPED, 2, dp="fsdp", tp=2, reshard="all"),
    "lora ddp": case(ODD | TIED, 1, lora=SEVEN, dp="ddp", replicate=2),
    "lora ddp selective": case(
        GROUPED, 2, packed=True, lora=RSLORA, dp="ddp", replicate=2, checkpointing="selective"
    ),
    "lora zero1": case(ODD, 1, lora=SEVEN, dp="zero1", replicate=2),
    "lora fsdp": case(ODD, 1, lora=SEVEN, dp="fsdp", shard=2),
    "lora fsdp reshard all": case(ODD, 1, lora=RSLORA, dp="fsdp", shard=2, reshard="all"),
    "lora fsdp adapters": case(ODD | TIED, 1, lora=SEVEN, dp="fsdp", shard=2, reshard="adapters"),
    "lora fsdp w2": case(GROUPED, 2, lora=beside("w2"), dp="fsdp", shard=2),
    "lora tp": case(GROUPED, 2, lora=RSLORA, dp="ddp", tp=2, checkpointing="selective"),
    "lora tp tied": case(GROUPED | TIED, 4, packed=True, lora=SEVEN, dp="ddp", tp=2),
    "lora tp wo": case(GROUPED, lora=beside("wo"), dp="ddp", tp=2),
}
COMPILED = {
    "ddp": case(ODD | dict(dim=240, ffn_dim=1400), dp="ddp", replicate=2, compile=True),
    "zero1": case(ODD, 2, dp="zero1", replicate=2, checkpointing="full", compile=True),
    "fsdp": case(ODD, 2, dp="fsdp", shard=2, checkpointing="selective", compile=True),
    "tp": case(GROUPED, dp="ddp", tp=2, checkpointing="full", compile=True),
}
ONE = {
    "plain": case(ODD, 1, packed=True),
    "selective": case(ODD | TIED, 2, checkpointing="selective"),
    "full": case(ODD, checkpointing="full"),
    "fsdp": case(ODD, 4, dp="fsdp", offload=True),
    "lora": case(ODD | TIED, 2, packed=True, lora=SEVEN, checkpointing="selective"),
}
FOURFOLD = {
    "zero1": case(ODD | TIED, 1, dp="zero1", replicate=4, checkpointing="selective"),
    "fsdp": case(ODD, 1, dp="fsdp", shard=4),
    "hsdp tied": case(ODD | TIED, 1, packed=True, dp="hsdp", replicate=2, shard=2),
    "ddp tp": case(GROUPED, 1, dp="ddp", replicate=2, tp=2),
    "fsdp tp": case(GROUPED, packed=True, dp="fsdp", shard=2, tp=2),
    "fsdp tp tied": case(GROUPED | TIED, 1, dp="fsdp", shard=2, tp=2, checkpointing="selective"),
    "tp": case(FOUR | TIED, 2, packed=True, dp="fsdp", tp=4),
    "lora hsdp adapters": case(
        ODD, 1, lora=RSLORA, dp="hsdp", replicate=2, shard=2, reshard="adapters"
    ),
    "lora fsdp tp": case(GROUPED | TIED, 1, lora=SEVEN, dp="fsdp", shard=2, tp=2),
}
MORE_FOURFOLD = {
    "lora fsdp tp adapters": case(
        GROUPED, packed=True, lora=RSLORA, dp="fsdp", shard=2, tp=2, reshard="adapters"
    ),
    "ddp": case(ODD | TIED, packed=True, dp="ddp", replicate=4),
    "hsdp reshard all": case(ODD, 1, dp="hsdp", replicate=2, shard=2, reshard="all"),
    "lora zero1": case(ODD, lora=SEVEN, dp="zero1", replicate=4),
    "lora tp": case(FOUR, 2, lora=RSLORA, dp="fsdp", tp=4),
    "hsdp": case(ODD, dp="hsdp", replicate=2, shard=2),
    "hsdp full": case(ODD, dp="hsdp", replicate=2, shard=2, checkpointing="full"),
    "lora ddp": case(ODD | TIED, packed=True, lora=SEVEN, dp="ddp", replicate=4),
    "lora hsdp": case(ODD, 1, lora=SEVEN, dp="hsdp", replicate=2, shard=2),
    "lora ddp tp": case(GROUPED, 1, lora=RSLORA, dp="ddp", replicate=2, tp=2),
}
MORE = {
    "lora fsdp tied": case(ODD | TIED, lora=SEVEN, dp="fsdp", shard=2, checkpointing="full"),
    "lora tp full": case(GROUPED, lora=RSLORA, dp="ddp", tp=2, checkpointing="full"),
    "lora tp w1 w3": case(GROUPED, 2, lora=beside("w1 w3"), dp="ddp", tp=2),
    "lora fsdp reshard none": case(ODD, 1, lora=RSLORA, dp="fsdp", shard=2, reshard="none"),
    "lora tp reshard all": case(GROUPED, 2, lora=RSLORA, dp="fsdp", tp=2, reshard="all"),
}
for cases, name in ((TWO, "ddp"), (TWO, "fsdp tied"), (FOURFOLD, "fsdp tp")):
    cases[name]["generate"] = True
# Every combination, of which the tests above are a choice; compiling makes them slow.
DATA = {
    "ddp": lambda n: dict(dp="ddp", replicate=n),
    "fsdp": lambda n: dict(dp="fsdp", shard=n),
    "hsdp": lambda n: dict(dp="hsdp", replicate=max(n // 2, 1), shard=min(n, 2)),
    "zero1": lambda n: dict(dp="zero1", replicate=n),
}
MESHES = [(dp, tp) for dp in DATA for tp in (1, 2, 4) if tp == 1 or STRATEGIES[dp].splits_layers]


def combinations(dp: str, tp: int, compiled: bool, lora: dict | None) -> dict:
    config = FOUR if tp == 4 else GROUPED
    options = dict(lora=lora, tp=tp, compile=compiled, **DATA[dp](4 // tp))
    return {
        f"{dp} tp={tp} {mode} {microbatch}": case(
            config, microbatch, packed=microbatch == 2, checkpointing=mode, **options
        )
        for mode in ("none", "selective", "full")
        for microbatch in ((2,) if lora and compiled else (1, 2))  # two graphs take their time
    }


def test_every_strategy_is_in_every_test():
    assert DATA.keys() == STRATEGIES.keys()
    for cases in (TWO, FOURFOLD):
        assert {case["parallel"]["dp"] for case in cases.values()} == STRATEGIES.keys()


def train(directory: Path, nproc: int, cases: dict, timeout: float = 300, within=()) -> dict:
    """What the cases come to on so many processes: one launch for all of them.

    `within` is what changed_copy returns, to train a changed model."""
    given, results = directory / "cases.json", directory / "results.pt"
    given.write_text(json.dumps(list(cases.values())))
    script = (*within, "tests/workers/train_cases.py")
    succeed(*script, given, results, nproc=nproc, timeout=timeout)
    return dict(zip(cases, torch.load(results, weights_only=False), strict=True))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return train(tmp_path_factory.mktemp("one"), 0, ONE)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return train(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return train(tmp_path_factory.mktemp("four"), 4, FOURFOLD)


@functools.cache
def plain(key: str) -> dict:
    """Steps on the whole batch in one process, in plain PyTorch: none of parallel.py runs.

    `key` is JSON of a case's config, packed, lora and steps. Adapters are added to the weights of a
    model without adapters."""
    config, packed, lora, steps, *seq = json.loads(key)
    model = build(config, lora).double()
    model.to_empty(device="cpu")
    model.tie_weights()
    initialize(model)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for p in trainable.values() if p.ndim == 2]
    free = [p for p in trainable.values() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    lr = 1e-3 if lora else 1e-2
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=False, foreach=False)
    batch, rows, gradients = batch_of(packed, *seq), [], {}
    bare = Llama(LlamaConfig(**config | dict(tie_embeddings=False))).double()
    for _ in range(steps):
        weights = effective(model, lora)
        given = {"tokens": batch.tokens, "positions": batch.positions}
        logits = torch.func.functional_call(bare, weights, (), given)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable.values(), 0.1)
        gradients = gradients or {n: p.grad.clone() for n, p in trainable.items()}
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), (batch.targets != IGNORE).sum().item(), norm.item()))
    assert all(norm > 0.1 for *_, norm in rows)  # so that clipping is seen to work
    return {"rows": rows, "gradients": gradients, "first": first,
            "last": dict(model.named_parameters())}  # fmt: skip


def effective(model: Llama, lora: dict | None) -> dict:
    """The weights that a model computes with, under the names of one without adapters: those that
    codes stand for, W + scale B A, and rows of DoRA's lengths."""
    named = dict(model.named_parameters())
    weights = {name: p for name, p in named.items() if name.endswith(".weight")}
    weights["output.weight"] = model.output.weight  # not listed where it is tied
    for name, weight in weights.items():
        if (row_scale := named.get(name.replace("weight", "row_scale"))) is not None:
            weight = weights[name] = dequantized(weight, row_scale, torch.float64)
        if (A := named.get(name.replace("weight", "lora_A"))) is not None:
            B, r = named[name.replace("weight", "lora_B")], lora["rank"]
            scale = lora.get("alpha", 16) / (r**0.5 if lora.get("rslora") else r)
            weights[name] = weight + scale * B @ A
        if (magnitude := named.get(name.replace("weight", "lora_magnitude"))) is not None:
            norms = weights[name].detach().norm(dim=1)
            weights[name] = (magnitude / norms)[:, None] * weights[name]
    return weights


def equals_plain(result: dict, case: dict) -> None:
    key = case["config"], case["packed"], case.get("lora"), case.get("steps", STEPS)
    key += (case["seq"],) if "seq" in case else ()
    same_training(result, plain(json.dumps(key)))


def same_training(result: dict, expected: dict, tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(result["rows"], expected["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    for what in ("gradients", "last"):
        assert result[what].keys() == expected[what].keys()
        for name, value in expected[what].items():
            value = value.double()  # codes of 4 bits, too
            error = (result[what][name] - value).norm() / value.norm()
            assert error < tolerance, (what, name, error)
    for name, value in expected["first"].items():
        is_norm = name.endswith("lora_magnitude")  # ranks add up squares in another order
        tolerances = dict(rtol=1e-14 if is_norm else 0, atol=0)
        assert torch.allclose(result["first"][name], value, **tolerances), name


def generates_alike(result: dict, case: dict) -> None:
    """A model that is split goes on with the tokens of one that has the same weights."""
    if "generate" not in case:
        return
    model = Llama(LlamaConfig(**case["config"])).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(result["last"][name])
    assert result["tokens"] == generate(model, [[1, 2, 3]], 4, temperature=0)


def sends_as_predicted(result: dict, case: dict, nproc: int) -> None:
    parallel = ParallelConfig(**case["parallel"])
    sizes = {dim: getattr(parallel, dim) for dim in ("pp", "replicate", "shard", "tp")}
    expected = dict(result["predicted"])
    if nproc > 1:  # and a step's all_gather_scalars, 40 bytes a rank over all ranks
        dim = next((dim for dim, size in sizes.items() if size == nproc), "world")
        calls, nbytes = expected.get((dim, "all-gather"), (0, 0))
        expected[dim, "all-gather"] = calls + 1, nbytes + nproc * 40
    assert result["sent"] == expected


def computes_once(result: dict, case: dict) -> None:
    """Attention runs forward once for each layer and microbatch, and chunk where ranks share
    sequences; twice, where all is recomputed."""
    parallel = ParallelConfig(**case["parallel"])
    parts = parallel.replicate * parallel.shard // parallel.cp
    microbatches = BATCH // parts // case.get("microbatch", BATCH // parts)
    times = 2 if parallel.checkpointing == "full" else 1
    times *= 2 if parallel.cp > 1 else 1  # for each chunk
    assert result["attentions"] == times * microbatches * result["layers"]


def compiles_once(result: dict, case: dict) -> None:
    """One graph for all blocks; above a frozen embedding the first has one of its own, since what
    comes in has no gradient."""
    graphs = 2 if "lora" in case else 1
    assert result["graphs"]["unique_graphs"] == graphs and not result["breaks"]


def holds(result: dict, case: dict, nproc: int) -> None:
    equals_plain(result, case)
    generates_alike(result, case)
    computes_once(result, case)
    if case["parallel"].get("compile"):
        compiles_once(result, case)
    else:
        sends_as_predicted(result, case, nproc)


@pytest.mark.parametrize("name", ONE)
def test_one_process(one, name):
    holds(one[name], ONE[name], 1)


@pytest.mark.parametrize("name", TWO)
def test_two_processes_equal_one(two, name):
    holds(two[name], TWO[name], 2)


@pytest.mark.parametrize("name", FOURFOLD)
def test_four_processes_equal_one(four, name):
    holds(four[name], FOURFOLD[name], 4)


def test_saving_gathers_adapters_and_no_more(two, four):
    for results, name in ((two, "lora ddp"), (two, "lora fsdp"), (four, "lora fsdp tp")):
        result = results[name]
        size = 0
        for key, factor in result["adapters"].items():
            assert torch.equal(factor, result["last"][key])
            size += factor.nbytes
        assert result["saving"] <= (0 if name == "lora ddp" else 2.2 * size)  # rounded up twice


def test_samples_gather_weights_once(two, four):
    """FSDP gathers each of two blocks once for four tokens; it has gathered the root before."""
    for result, gathers in ((two["fsdp tied"], 2), (four["fsdp tp"], 2), (two["ddp"], 0)):
        assert result["sampling"] == gathers


def test_tensor_parallelism_refuses_what_has_no_place():
    def refuses(name: str, model: Llama, remedy: str = "add its layer to PLAN in") -> None:
        with pytest.raises(UserError, match=f"--tp cannot shard {name}: {remedy}"):
            tensor_parallel(model, mesh=None)
        with pytest.raises(UserError, match=f"--tp cannot shard {name}"):
            predict_memory(step_of(model, ParallelConfig(tp=2), 1, 1, 13))  # before it is built

    def attention(model: Llama) -> nn.Module:
        return model.layers["0"].attention

    def new_model() -> Llama:
        return build_on_meta(LlamaConfig(**GROUPED))

    with torch.device("meta"):
        attention(model := new_model()).q_norm = nn.RMSNorm(10)
        refuses("layers.0.attention.q_norm.weight", model)
        attention(model := new_model()).wq = nn.Linear(40, 40, bias=True)
        refuses("layers.0.attention.wq.bias", model, "PLAN shards the weight of its layer alone")
        attention(model := new_model()).gate = nn.Parameter(torch.ones(4))
        refuses("layers.0.attention.gate", model, "move it into a module of its own")
        (model := new_model()).positions = nn.Embedding(13, 40)
        refuses("positions.weight", model)
        (model := new_model()).scale = nn.Parameter(torch.ones(40))
        refuses("scale", model, "move it into a module of its own")


def test_what_the_model_was_built_with_is_not_lost_or_replaced():
    world = SimpleNamespace(parallel=ParallelConfig(), device="cpu", mesh=SimpleNamespace())
    world.mesh.get_local_rank = lambda dim: 0
    model = Llama(LlamaConfig(**GROUPED))
    model.layers["0"].attention.register_buffer("slopes", torch.ones(4))
    with pytest.raises(
        UserError, match=r"layers\.0\.attention\.slopes is a buffer, which would lose"
    ):
        parallelize(model, world, initialize)
    model = build_on_meta(LlamaConfig(**GROUPED))
    model.layers["0"].attention.wv.weight = model.layers["0"].attention.wk.weight
    with pytest.raises(UserError, match=r"layers\.0\.attention\.wv\.weight is shared"):
        parallelize(model, world, initialize)
    smoothed = Llama(LlamaConfig(**GROUPED))
    smoothed.loss = lambda hidden, weight, targets, *_: hidden.sum()
    with pytest.raises(UserError, match=r"not another model\.loss: change loss_of"):
        tensor_parallel(smoothed, mesh=None)


def test_replicas_that_begin_differently_are_refused():
    model = Llama(LlamaConfig(**GROUPED))
    for norms, codes, message in (  # of a base in 4 bits, sums of codes
        ([1.0, 2.0, 1.0, 2.0], [5, 6, 5, 6], None),
        ([1.0, 2.0, 1.0, 2.1], [5, 6, 5, 6], "rank 3 begins with other weights than rank 1"),
        ([1.0, 2.0, 1.0, 2.0], [5, 6, 4, 6], "rank 2 begins with other weights than rank 0"),
    ):
        sums = torch.tensor([norms, codes]).T
        world = SimpleNamespace(
            parallel=ParallelConfig(dp="hsdp", replicate=2, shard=2),
            all_gather_scalars=lambda _, sums=sums: sums,
        )
        with pytest.raises(UserError, match=message) if message else nullcontext():
            check_equal_replicas(model, world)


class Products(TorchDispatchMode):
    """A context that counts the matrix products that run in it."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.__name__ == "mm.default"
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved, recomputed", [(("wk", "wo"), 4), (("wq", "wk", "wv"), 3), ((), 6)])
def test_selective_checkpointing_saves_what_a_module_says(saved, recomputed, monkeypatch):
    """Of the seven products of a block, backward never needs the output of w2."""
    monkeypatch.setattr(Attention, "saved_products", saved)
    monkeypatch.setattr(FeedForward, "saved_products", ())
    y = run_block(compile=False)
    with Products() as products:
        y.sum().backward()
    assert products.count == 2 * 7 + recomputed


@pytest.mark.slow
def test_compiled_selective_checkpointing_saves_the_same():
    shapes = []

    def note(saved: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(saved.shape))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        run_block(compile=True)
    wide = [shape for shape in shapes if shape[0] == 13 and shape[1] in (20, 46)]
    assert wide.count((13, 20)) == 1  # wk
    assert wide.count((13, 46)) == 1  # w3
    assert shapes.count((13, 40)) >= 1  # wo


def run_block(compile: bool) -> torch.Tensor:
    """Return the output of one block under selective checkpointing."""
    torch._dynamo.reset()
    model = Llama(LlamaConfig(**GROUPED))
    model.init_weights()
    recompute_and_compile(model, "selective", compile)
    x = torch.randn(1, 13, 40, requires_grad=True)
    return model.layers["0"](x, *rope_angles(model.config, torch.arange(13)[None]))


def test_the_mesh_is_told(two, four):
    assert two["ddp"]["mesh"] == "mesh: 2 replicate; replicate groups (0 1)"
    assert four["fsdp tp"]["mesh"] == (
        "mesh: 2 shard x 2 tp; tp groups (0 1) (2 3); shard groups (0 2) (1 3)"
    )


def test_neighbours_share_what_talks_most(four):
    """As seen from rank 0: tp and shard lie within a node of two, replicate goes across."""
    one = {"pp": [0]}
    assert four["hsdp tied"]["ranks"] == one | {"replicate": [0, 2], "shard": [0, 1], "tp": [0]}
    assert four["fsdp tp"]["ranks"] == one | {"replicate": [0], "shard": [0, 2], "tp": [0, 1]}
    assert four["ddp tp"]["ranks"] == one | {"replicate": [0, 2], "shard": [0], "tp": [0, 1]}


@pytest.mark.slow
def test_compiled_on_two_processes(tmp_path):
    for name, result in train(tmp_path, 2, COMPILED).items():
        holds(result, COMPILED[name], 2)


@pytest.mark.slow
def test_more_adapters_on_two_processes(tmp_path):
    for name, result in train(tmp_path, 2, MORE).items():
        holds(result, MORE[name], 2)


@pytest.mark.slow
def test_more_on_four_processes(tmp_path):
    for name, result in train(tmp_path, 4, MORE_FOURFOLD).items():
        holds(result, MORE_FOURFOLD[name], 4)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, RSLORA], ids=["full", "lora"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dp, tp", MESHES)
def test_every_combination_equals_one_process(tmp_path, dp, tp, compiled, lora):
    cases = combinations(dp, tp, compiled, lora)
    for name, result in train(tmp_path, 4, cases, timeout=600).items():
        holds(result, cases[name], 4)


# ------------------------------------------------------------------------------- what stays small


def test_no_rank_holds_the_logits_of_all_tokens_or_of_the_whole_vocabulary():
    out = succeed("tests/workers/largest_tensor.py", nproc=2).out
    assert out.split() == [
        str(52 * 499),
        str(52 * 498),
    ]  # tokens in a chunk x vocabulary shard of the rank


def test_a_wrapped_block_is_not_wrapped_again():
    for compiled in (False, True):
        model = Llama(LlamaConfig(**ODD))
        recompute_and_compile(model, "full", compiled)
        with pytest.raises(UserError, match="block 0 is wrapped already"):
            recompute_and_compile(model, "selective", False)
    own = Llama(LlamaConfig(**ODD))
    own.layers["0"] = type("OwnBlock", (Block,), {})(own.config, 0)
    recompute_and_compile(own, "full", False)
    wrapped = Llama(LlamaConfig(**ODD))
    wrapped.layers["1"] = checkpoint_wrapper(wrapped.layers["1"])
    with pytest.raises(UserError, match="block 1 is wrapped already"):
        recompute_and_compile(wrapped, "none", False)


def test_traffic_in_bfloat16_is_as_predicted(tmp_path):
    """FSDP gathers half the bytes, tensor parallelism sends half; sums of gradients are float32."""
    cases = {
        "fsdp": case(ODD, 1, dp="fsdp", shard=2),
        "zero1": case(ODD, 1, dp="zero1", replicate=2),
        "tp": case(GROUPED, dp="fsdp", tp=2),
        "tp accumulating": case(GROUPED, 2, dp="fsdp", tp=2),
        "lora ddp": case(ODD | TIED, 1, lora=SEVEN, dp="ddp", replicate=2),
        "lora fsdp": case(ODD, 1, lora=SEVEN, dp="fsdp", shard=2),
        "lora fsdp adapters": case(ODD, 1, lora=SEVEN, dp="fsdp", shard=2, reshard="adapters"),
        "lora tp": case(GROUPED, 2, lora=SEVEN, dp="fsdp", tp=2),
    }
    for options in cases.values():
        options["dtype"] = "bfloat16"
    for name, result in train(tmp_path, 2, cases).items():
        sends_as_predicted(result, cases[name], 2)
        lora, last = "lora" in name, result["last"]
        assert last["norm.weight"].dtype == (torch.bfloat16 if lora else torch.float32)
        assert not lora or last["layers.0.attention.wq.lora_A"].dtype == torch.float32


@pytest.mark.slow
def test_many_collectives_at_once_do_not_crash():
    """With gloo's own two threads for each group, most runs crash within seconds."""
    succeed("tests/workers/many_collectives.py", 20)
