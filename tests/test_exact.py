"""Every split computes what one process does, to 1e-12 (Muon: 1e-10), and sends as predicted.

Cases are chosen by pairwise testing: any two values of two OPTIONS occur together in some case,
unless the project refuses them together. The fast tests take QUICK: cases of a short draw that add
most pairs and compute little. `-m slow` takes all cases of a long draw too, compiled ones among
them, and some that are new each day. What rounds is compared with our own step on one process."""

import functools
import itertools
import operator
import os
from datetime import date
from functools import partial
from pathlib import Path

import exact
import pytest
from conftest import HAS_2_13, asks_for_slow
from exact import FOUR_HEADS, GROUPED, ODD, assert_case, attentions, case, check_step, meta_model
from pairs import LONG, SHORT, case_name, pairwise, random_walk
from workers.train_cases import BATCH, SEQ, steps_of

from config import FLAGS, Work
from model import LlamaConfig
from plumbing.messages import UserError
from preferences import LOSSES
from techniques.schedules import SCHEDULES

ADAPTERS = {
    "none": None,
    "all": dict(rank=3, alpha=16),
    "w2": dict(rank=2, alpha=64, targets=["w2"]),  # backward ends at the first of them
    "w1 w3": dict(rank=4, alpha=64, rslora=True, targets=["w1", "w3"]),
    "wq wo": dict(rank=2, alpha=4, targets=["wq", "wo"]),
    "dora": dict(rank=4, alpha=8, rslora=True, dora=True),
}
EXPERTS = {
    "none": {},
    "bias": dict(n_experts=8),
    "plain": dict(n_experts=6, top_k=3, balance="none"),  # ranks divide them unevenly
}
# Fields that are not drawn: sizes that follow from others, and the dtype.
NOT_DRAWN = "shard", "stages_per_rank", "dtype"


def values_of(field) -> tuple:
    """Return the values that tests draw of a field of ParallelConfig, its default first."""
    if field.name == "schedule":
        values = SCHEDULES
    elif isinstance(field.default, bool):
        values = (False, True)
    else:
        values = field.metadata["flag"].choices or (1, 2, 4)
    wanted = dict.fromkeys([field.default, *values])
    return tuple(value for value in wanted if value != "auto")


OPTIONS = {name: values_of(field) for name, field in FLAGS.items() if name not in NOT_DRAWN}
OPTIONS |= dict(
    adapters=tuple(ADAPTERS),
    base_bits=(16, 4),
    experts=tuple(EXPERTS),
    microbatch=(2, 1, 4),
    packed=(False, True),
    tied=(False, True),
    rope_scaling=(1.0, 8.0),
    qk_norm=(False, True),
    qkv_bias=(False, True),
    generate=(False, True),
)
FAST = {1: 12, 2: 14, 4: 10}  # ranks to train on -> how many cases the fast tests take
MOST_ATTENTIONS = 8  # forwards of attention in one step of a case that the fast tests take
SEED = os.environ.get("SEED", f"{date.today():%Y%m%d}")  # for the cases that are new each day
CASE_TEST = "test_a_split_computes_what_one_process_computes"


def make_case(ranks: int, drawn: dict) -> dict:
    """Return a case of exact.py. Raises UserError where the project refuses it, for options that
    have no effect together, and where there is no reference to compare with."""
    options = {name: value for name, value in drawn.items() if name in FLAGS}
    lora, bits, tp, cp = ADAPTERS[drawn["adapters"]], drawn["base_bits"], drawn["tp"], drawn["cp"]
    float8 = drawn["float8"] != "none"
    parallel = exact.parallel_config(ranks, bool(lora), **options)
    data = parallel.replicate * parallel.shard
    if BATCH * cp // data % drawn["microbatch"]:
        raise UserError("sequences are no whole number of microbatches")
    if bits == 4 and not lora:
        raise UserError("without adapters, 4 bits have no effect")
    if drawn["experts"] != "none" and lora and drawn["adapters"] != "wq wo":
        raise UserError("experts have no adapters")
    if drawn["experts"] != "none" and bits == 4:
        raise UserError("experts are not stored in 4 bits")
    if drawn["generate"] and (lora or float8):
        raise UserError("tokens are compared with those of a plain model")
    if cp > 1 and (float8 or drawn["moments"] == "bfloat16"):
        raise UserError("other tokens are rounded together than on one process")
    if float8 and drawn["async_tp"]:
        raise UserError("other chunks are rounded together than on one process")
    config = {1: ODD, 2: GROUPED, 4: FOUR_HEADS}[tp]
    if bits == 4 or float8:  # both compute in blocks of features: each rank needs whole ones
        config = config | dict(dim=64 * max(tp, 2), n_heads=4, n_kv_heads=4, ffn_dim=256)
    config = config | dict(tie_embeddings=drawn["tied"], rope_scaling=drawn["rope_scaling"])
    config = config | dict(qkv_bias=drawn["qkv_bias"]) | EXPERTS[drawn["experts"]]
    if drawn["qk_norm"]:  # and, as in Qwen3, heads that are together wider than the model
        config = config | dict(qk_norm=True, head_dim=16 if config["dim"] % 64 else 64)
    if parallel.pp > 1:
        config = config | dict(n_layers=parallel.pp * parallel.stages_per_rank + 1)
    seq = SEQ if HAS_2_13 or tp == 1 else 16
    seq = 24 if cp > 1 else 16 if float8 else seq  # 2 cp has to divide it, or float8's 16
    model = meta_model(LlamaConfig(**config), trainable=not lora)
    check_step(Work(model, parallel, BATCH, drawn["microbatch"], seq), bits)
    options |= dict(replicate=parallel.replicate, shard=parallel.shard)
    options |= dict(stages_per_rank=parallel.stages_per_rank)
    given = case(config, drawn["microbatch"], **options) | dict(packed=drawn["packed"])
    given |= {"lora": lora | dict(base_bits=bits)} if lora else {}
    given |= {"seq": seq} if seq != SEQ else {}
    return given | ({"generate": True} if drawn["generate"] else {})


def is_possible(ranks: int, drawn: dict) -> bool:
    try:
        return bool(make_case(ranks, drawn))
    except UserError:
        return False


def drawn_quickly(ranks: int) -> list[dict]:
    """Return cases of a short draw that compute little, those that add most pairs first."""
    quick = []
    for drawn in pairwise(OPTIONS, partial(is_possible, ranks), ranks, SHORT):
        given = make_case(ranks, drawn)
        few = attentions(given, given["config"]["n_layers"] / drawn["pp"]) <= MOST_ATTENTIONS
        quick += [drawn] if few and not drawn["compile"] else []
    return quick[: FAST[ranks]]


def drawn_slowly(ranks: int) -> list[dict]:
    """Return cases that cover all other pairs of a long draw, and every two-hundredth case of a
    random walk that starts anew each day."""
    possible = partial(is_possible, ranks)
    walk = random_walk(OPTIONS, possible, f"{SEED} {ranks}")
    cost = dict(cost=lambda drawn: 3 if drawn["compile"] else 1, covered=DRAWN[ranks])
    long = pairwise(OPTIONS, possible, ranks, LONG, **cost)
    return [*itertools.islice(walk, 200, 1000, 200), *long]


def named(ranks: int, drawn: list[dict]) -> dict[str, tuple[int, dict]]:
    """Return name -> (ranks, case of exact.py) for the values of some cases."""
    names = (f"{ranks} ranks: {case_name(values, OPTIONS)}" for values in drawn)
    return {name: (ranks, make_case(ranks, values)) for name, values in zip(names, drawn)}


DRAWN = {ranks: drawn_quickly(ranks) for ranks in FAST}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
# Seldom drawn are a matrix that is tied and sharded twice, and biases without adapters in chunks;
# never, gradients of several DDP buckets and another loss.
TIED = PLAIN | dict(dp="fsdp", tp=2, tied=True, generate=True)
BIASED = PLAIN | dict(tp=2, async_tp=True, qkv_bias=True)
# Without experts --ep is refused, so that few draws have it.
EP = PLAIN | dict(dp="fsdp", ep=2, experts="bias")
EP_2 = [EP | dict(microbatch=1, generate=True), EP | dict(tp=2, checkpointing="full", packed=True)]
EP_4 = [EP | dict(dp="ddp", experts="plain", optimizer="muon"), EP | dict(pp=2, reshard="none")]
EP_4 += [EP | dict(tp=2, ep=4, cp=2, checkpointing="selective", microbatch=4, optimizer="muon")]
QUICK = named(1, DRAWN[1]) | named(2, [*DRAWN[2], BIASED, *EP_2])
QUICK |= named(4, [*DRAWN[4], TIED, *EP_4])
BUCKETS = make_case(2, PLAIN) | dict(config=ODD | dict(dim=240, ffn_dim=1400))
QUICK["2 ranks: several buckets"] = 2, BUCKETS
for ranks in (1, 2):
    own_loss = make_case(ranks, PLAIN | dict(tp=ranks)) | dict(own_loss=True)
    QUICK[f"{ranks} ranks: tp={ranks} own loss"] = ranks, own_loss

# Preferences on rows of pairs, with the adapters off in a second forward, or with all weights; and
# sampled answers that were rewarded.
QUICK |= {
    f"{ranks} ranks: {objective} {adapters} {values}": (
        ranks,
        make_case(ranks, PLAIN | dict(packed=objective in LOSSES, adapters=adapters) | values)
        | dict(objective=objective, seq=24),
    )
    for ranks, objective, adapters, values in (
        (1, "sigmoid", "w1 w3", dict(microbatch=1, checkpointing="full")),
        (1, "ipo", "dora", dict(base_bits=4)),
        (1, "rewards", "dora", dict(base_bits=4)),
        (2, "sigmoid", "all", dict(dp="ddp")),
        (2, "sigmoid", "dora", dict(dp="fsdp")),
        (2, "sigmoid", "dora", dict(tp=2)),
        (2, "ipo", "all", dict(cp=2, microbatch=4)),
        (2, "sigmoid", "dora", dict(pp=2, schedule="zero-bubble", microbatch=1)),
        (2, "sigmoid", "none", dict(cp=2, dp="fsdp")),
        (2, "sigmoid", "none", dict(dp="fsdp", offload=True)),
        (2, "ipo", "none", dict(dp="fsdp", ep=2, experts="plain")),
        (2, "ipo", "none", dict(tp=2, tied=True)),
        (2, "sigmoid", "none", dict(pp=2, microbatch=1)),
        (2, "rewards", "none", dict(dp="fsdp", microbatch=1)),
        (2, "rewards", "all", dict(tp=2)),
        (2, "rewards", "all", dict(cp=2, microbatch=4)),
        (2, "rewards", "none", dict(pp=2, schedule="zero-bubble", microbatch=1)),
    )
}


def of_objectives(cases: dict[str, tuple[int, dict]]) -> dict[str, tuple[int, dict]]:
    """Return some cases again as those of preferences or, where rows are no pairs, of rewards."""
    usable = [
        (name, ranks, given)
        for name, (ranks, given) in cases.items()
        if not (reference_of(given) or given["config"].get("n_experts") or "generate" in given)
    ]
    found, losses = {}, itertools.cycle(LOSSES)
    for name, ranks, given in usable[::3]:
        objective = next(losses) if given["packed"] else "rewards"
        found[f"{name} {objective}"] = ranks, given | dict(objective=objective, seq=24)
    return found


@functools.cache
def slower_cases() -> dict[str, tuple[int, dict]]:
    """Return all others: drawing them takes some seconds."""
    cases = functools.reduce(operator.or_, (named(ranks, drawn_slowly(ranks)) for ranks in FAST))
    slower = {name: entry for name, entry in cases.items() if name not in QUICK}
    slower |= of_objectives(slower)
    compiled = [given for _, given in slower.values() if given["parallel"]["compile"]]
    for i, given in enumerate(compiled):  # most are traced and differentiated without kernels
        given["backend"] = "aot_eager_decomp_partition" if i % 4 else "inductor"
    return slower


def train_all(directory: Path, cases: dict[str, tuple[int, dict]], within=()) -> dict:
    """Train cases in one launch for each number of ranks."""
    results = {}
    for ranks in FAST:
        ours = {name: given for name, (n, given) in cases.items() if n == ranks}
        if ours:
            options = dict(timeout=1800, within=within)
            results |= exact.train(directory, ranks * (ranks > 1), ours, **options)
    return results


def reference_of(given: dict) -> dict | None:
    """Return the same case on one process for a case that rounds to fewer bits, which plain PyTorch
    does not. That it rounds as it should is left to test_float8.py and test_adamw.py."""
    parallel = {name: given["parallel"][name] for name in ("float8", "moments", "optimizer")}
    rounds = parallel["float8"] != "none" or parallel["moments"] != "float32"
    return given | {"parallel": parallel, "steps": steps_of(given)} if rounds else None


def train_references(directory: Path, cases: dict[str, tuple[int, dict]]) -> dict:
    references = (reference_of(given) for _, given in cases.values())
    wanted = {str(reference): reference for reference in references if reference}
    return exact.train(directory, 0, wanted, timeout=1800) if wanted else {}


def assert_result(ranks: int, given: dict, result: dict, references: dict) -> None:
    """Assert that the result of a case equals its reference."""
    reference = reference_of(given)
    assert_case(result, given, ranks, reference and references[str(reference)])


def test_config_names_every_schedule():
    told = FLAGS["schedule"].metadata["flag"].help
    assert all(f"{name}," in told for name in SCHEDULES)


def pytest_generate_tests(metafunc) -> None:
    if metafunc.function.__name__ == CASE_TEST:
        slower = slower_cases() if asks_for_slow(metafunc.config) else {}
        cases = [pytest.param(*given, id=name) for name, given in QUICK.items()]
        cases += [pytest.param(*slower[name], id=name, marks=pytest.mark.slow) for name in slower]
        metafunc.parametrize("ranks, given", cases)


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Return the results of the selected cases, and of the references that they need."""
    items = [item for item in request.session.items if item.originalname == CASE_TEST]
    calls = [item.callspec for item in items]
    cases = {call.id: (call.params["ranks"], call.params["given"]) for call in calls}
    directory = tmp_path_factory.mktemp("cases")
    return train_all(directory, cases), train_references(directory, cases)


def test_a_split_computes_what_one_process_computes(trained, request, ranks, given):
    results, references = trained
    name = request.node.callspec.id
    print(f"SEED={SEED} pytest -m 'slow or not slow' 'tests/test_exact.py::{CASE_TEST}[{name}]'")
    assert_result(ranks, given, results[name], references)
