"""Every way to split a model computes what one process computes in plain PyTorch, to 1e-12, and
sends what costs/traffic.py predicts.

Cases are made, not listed: in some case every two values of two OPTIONS meet, unless the project
refuses them together. The fast tests take those with most pairs, FAST for each number of ranks, `-m
slow` the others, compiled ones among them, and some that it draws anew each day."""

import itertools
import os
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import pytest
from exact import (
    FOUR,
    GROUPED,
    ODD,
    RSLORA,
    SEVEN,
    accepts,
    beside,
    case,
    check,
    compiles_once,
    computes_once,
    equals_plain,
    generates_alike,
    same_training,
    sends_as_predicted,
    shapes,
    split,
    train,
)
from pairs import cover, name_of, params, walk
from workers.train_cases import BATCH, SEQ

from costs.work import Work
from model import LlamaConfig
from parallel import STRATEGIES
from plumbing.processes import UserError
from techniques.float8 import RECIPES
from techniques.schedules import SCHEDULES

ADAPTERS = {
    "none": None,
    "all": SEVEN,
    "rslora": RSLORA,
    "w2": beside("w2"),
    "w1 w3": beside("w1 w3"),
    "dora": RSLORA | dict(dora=True),
}
OPTIONS = dict(
    dp=("ddp", "zero1", "fsdp", "hsdp"),
    tp=(1, 2, 4),
    cp=(1, 2, 4),
    pp=(1, 2, 4),
    schedule=("1f1b", "gpipe", "interleaved", "zero-bubble"),
    reshard=("weights", "none", "all", "adapters"),
    checkpointing=("none", "selective", "full"),
    compile=(False, True),
    offload=(False, True),
    offload_activations=(False, True),
    async_tp=(False, True),
    float8=("none", "tensorwise", "rowwise", "mxfp8"),
    optimizer=("adamw", "muon"),
    moments=("float32", "bfloat16"),
    adapters=tuple(ADAPTERS),
    base_bits=(16, 4),
    microbatch=(2, 1, 4),
    packed=(False, True),
    tied=(False, True),
    rope_scaling=(1.0, 8.0),
    generate=(False, True),
)
FAST = 12
SEED = os.environ.get("SEED", f"{date.today():%Y%m%d}")  # of what is drawn anew
CASE_TEST = "test_a_split_computes_what_one_process_computes"


def made(ranks: int, drawn: dict) -> dict:
    """Return a case of exact.py. Raises UserError where the project refuses it, for options that
    mean nothing, and for what has no reference."""
    names = "adapters", "base_bits", "microbatch", "packed", "tied", "rope_scaling", "generate"
    more = {name: drawn[name] for name in names}
    options = {name: value for name, value in drawn.items() if name not in more}
    lora, bits, tp, cp = ADAPTERS[more["adapters"]], more["base_bits"], options["tp"], options["cp"]
    float8 = options["float8"] != "none"
    parallel = split(ranks, bool(lora), **options)
    data = parallel.replicate * parallel.shard
    if BATCH * cp // data % more["microbatch"]:
        raise UserError("sequences are no whole number of microbatches")
    if bits == 4 and not lora:
        raise UserError("without adapters, 4 bits mean nothing")
    if more["generate"] and (lora or float8):
        raise UserError("tokens are compared with those of a plain model")
    if cp > 1 and (float8 or options["moments"] == "bfloat16"):
        raise UserError("other tokens are rounded together than on one process")
    if float8 and options["async_tp"]:
        raise UserError("other chunks are rounded together than on one process")
    config = {1: ODD, 2: GROUPED, 4: FOUR}[tp]
    if bits == 4 or float8:  # which need blocks of widths
        config = config | dict(dim=64 * max(tp, 2), n_heads=4, n_kv_heads=4, ffn_dim=256)
    config = config | dict(tie_embeddings=more["tied"], rope_scaling=more["rope_scaling"])
    if parallel.pp > 1:
        config = config | dict(n_layers=parallel.pp * parallel.stages_per_rank + 1)
    seq = 24 if cp > 1 else 16 if float8 else SEQ
    model = shapes(LlamaConfig(**config), learns=not lora)
    check(Work(model, parallel, BATCH, more["microbatch"], seq), bits)
    sizes = dict(replicate=parallel.replicate, shard=parallel.shard)
    options |= sizes | dict(stages_per_rank=parallel.stages_per_rank)
    lora = lora and lora | dict(base_bits=bits)
    given = case(config, more["microbatch"], more["packed"], lora, **options)
    given |= {"seq": seq} if seq != SEQ else {}
    given |= {"flags": {"moments": options["moments"]}}
    return given | ({"generate": True} if more["generate"] else {})


def drawn_today(ranks: int) -> list[dict]:
    """Every hundredth case of a walk that begins anew each day."""
    steps = walk(OPTIONS, accepts(made, ranks), f"{SEED} {ranks}")
    return list(itertools.islice(steps, 100, 900, 100))


CHOSEN = {ranks: cover(OPTIONS, accepts(made, ranks), seed=ranks) for ranks in (1, 2, 4)}
TODAY = {ranks: drawn_today(ranks) for ranks in CHOSEN}
CASES = {
    f"{ranks} ranks: {name_of(drawn, OPTIONS)}": (ranks, made(ranks, drawn))
    for cases in (TODAY, CHOSEN)
    for ranks in cases
    for drawn in cases[ranks]
}
COMPILED = [given for _, given in CASES.values() if given["parallel"]["compile"]]
for i, given in enumerate(COMPILED):  # all are traced and differentiated; a third get kernels
    given["backend"] = "aot_eager_decomp_partition" if i % 3 else "inductor"
EAGER = {
    ranks: [f"{ranks} ranks: {name_of(d, OPTIONS)}" for d in drawn if not d["compile"]]
    for ranks, drawn in CHOSEN.items()
}
QUICK = [name for names in EAGER.values() for name in names[:FAST]]  # those with most new pairs
SLOWER = [name for names in EAGER.values() for name in names[FAST:]]


def train_all(directory: Path, names: Iterable[str], within=()) -> dict:
    """Train these cases: one launch for each number of ranks."""
    results = {}
    for ranks in CHOSEN:
        cases = {name: CASES[name][1] for name in names if CASES[name][0] == ranks}
        if cases:
            results |= train(directory, ranks * (ranks > 1), cases, timeout=1800, within=within)
    return results


def rounds(given: dict) -> bool:
    return given["parallel"]["float8"] != "none" or given["parallel"]["moments"] != "float32"


def reference_of(given: dict) -> dict:
    """Where numbers are rounded, another reference: the same case on one process, not split, of
    which test_float8 and test_adamw say that it rounds as it should."""
    parallel = {name: given["parallel"][name] for name in ("float8", "moments", "optimizer")}
    return given | {"parallel": parallel}


def train_references(directory: Path, names: Iterable[str]) -> dict:
    cases = [reference_of(CASES[name][1]) for name in names if rounds(CASES[name][1])]
    return train(directory, 0, {str(given): given for given in cases}) if cases else {}


def holds(name: str, result: dict, references: dict) -> None:
    """Assert all that is said of a case."""
    ranks, given = CASES[name]
    if rounds(given):
        same_training(result, references[str(reference_of(given))])
    else:
        equals_plain(result, given)
    generates_alike(result, given)
    computes_once(result, given)
    if given["parallel"]["compile"]:
        compiles_once(result, given)
    else:
        sends_as_predicted(result, given, ranks)


def test_every_strategy_schedule_and_recipe_is_drawn():
    assert set(OPTIONS["dp"]) == STRATEGIES.keys() and set(OPTIONS["schedule"]) == SCHEDULES.keys()
    assert set(OPTIONS["float8"]) == {"none", *RECIPES}


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """What the selected cases, and the references that they need, come to."""
    items = [item for item in request.session.items if item.originalname == CASE_TEST]
    names = [item.callspec.params["name"] for item in items]
    directory = tmp_path_factory.mktemp("cases")
    return train_all(directory, names), train_references(directory, names)


@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_a_split_computes_what_one_process_computes(trained, name):
    results, references = trained
    print(f"SEED={SEED} pytest -m 'slow or not slow' 'tests/test_exact.py::{CASE_TEST}[{name}]'")
    holds(name, results[name], references)
