"""Every split computes what one process does, to 1e-12 (Muon: 1e-10), and sends as predicted.

The reference is plain.py. Cases are chosen by pairwise testing: any two values of two OPTIONS that
a long random walk meets occur together in some case; PAIRS counts them. The fast tests take QUICK:
cases of a short draw that add most pairs and compute little. `-m slow` takes all cases of a long
draw too, compiled ones among them, and some that are new each day. What rounds is compared with our
own step on one process."""

import functools
import itertools
from functools import partial
from pathlib import Path

import exact
import pytest
from conftest import HAS_2_13, SEED, asks_for_slow
from exact import FOUR_HEADS, GROUPED, ODD, assert_case, attentions, case, check_step, meta_model
from pairs import LONG, SHORT, case_name, pairwise, random_walk
from workers.train_cases import BATCH, DISTILLED, SEQ, config_of, steps_of

from config import FLAGS, Work
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
    "latents": dict(rank=2, alpha=4, targets=["wq_a", "wkv_a", "wkv_b", "wo"]),
    "latents, dora": dict(rank=2, alpha=64, dora=True, targets=["wq_b", "wkv_a"]),
}
FAMILIES = {
    "llama": {},
    "qwen2": dict(family="qwen2"),
    "qwen3": dict(family="qwen3"),
    "mixtral": dict(family="mixtral"),
    # Ranks divide its experts unevenly.
    "qwen3_moe": dict(family="qwen3_moe", n_experts=6, top_k=3, balance="none"),
    "deepseek_v3": dict(
        family="deepseek_v3", n_experts=8, top_k=3, head_dim=16, rope_dim=4, value_dim=10,
        q_rank=22, kv_rank=14, dense_dim=44, rope_original=8,
    ),
    "olmo2": dict(family="olmo2"),
    "olmo3": dict(family="olmo3", window=4, full_every=2),
    "gemma3": dict(family="gemma3", window=4, full_every=2, score_dim=12),
}  # fmt: skip
EXPERTS = "mixtral", "qwen3_moe", "deepseek_v3"
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
    distinct = dict.fromkeys([field.default, *values])
    return tuple(value for value in distinct if value != "auto")


OPTIONS = {name: values_of(field) for name, field in FLAGS.items() if name not in NOT_DRAWN}
OPTIONS |= dict(
    adapters=tuple(ADAPTERS),
    base_bits=(16, 4),
    family=tuple(FAMILIES),
    microbatch=(2, 1, 4),
    packed=(False, True),
    tied=(False, True),
    rope_scaling=(1.0, 8.0),
    generate=(False, True),
)
FAST = {1: 10, 2: 10, 4: 3}  # ranks to train on -> how many cases the fast tests take
MOST_ATTENTIONS = 8  # forwards of attention in one step of a case that the fast tests take
CASE_TEST = "test_a_split_computes_what_one_process_computes"


def make_case(ranks: int, drawn: dict) -> dict:
    """Return a case of exact.py. Raises UserError where the project refuses it, for options that
    have no effect together, and where there is no reference to compare with."""
    options = {name: value for name, value in drawn.items() if name in FLAGS}
    lora = ADAPTERS[drawn["adapters"]]
    bits = drawn["base_bits"]
    tp = drawn["tp"]
    cp = drawn["cp"]
    microbatch = drawn["microbatch"]
    family = FAMILIES[drawn["family"]]
    has_experts = drawn["family"] in EXPERTS
    has_float8 = drawn["float8"] != "none"
    parallel = exact.parallel_config(ranks, bool(lora), **options)
    data_ranks = parallel.replicate * parallel.shard
    share = BATCH * cp // data_ranks
    if share % microbatch:
        raise UserError("sequences are no whole number of microbatches")
    if bits == 4 and not lora:
        raise UserError("without adapters, 4 bits have no effect")
    if lora and drawn["adapters"].startswith("latents") != (drawn["family"] == "deepseek_v3"):
        raise UserError("other families have other matrices")
    if has_experts and lora and drawn["adapters"] not in ("wq wo", "latents", "latents, dora"):
        raise UserError("experts have no adapters")
    if has_experts and bits == 4:
        raise UserError("experts are not stored in 4 bits")
    if drawn["generate"] and (lora or has_float8):
        raise UserError("tokens are compared with those of a plain model")
    if cp > 1 and (has_float8 or drawn["moments"] == "bfloat16"):
        raise UserError("other tokens are rounded together than on one process")
    if has_float8 and drawn["async_tp"]:
        raise UserError("other chunks are rounded together than on one process")
    config = dict({1: ODD, 2: GROUPED, 4: FOUR_HEADS}[tp])
    if bits == 4 or has_float8:  # both compute in blocks of features: each rank needs whole ones
        config |= dict(dim=64 * max(tp, 2), n_heads=4, n_kv_heads=4, ffn_dim=256)
    config["tie_embeddings"] = drawn["tied"]
    config |= family
    if drawn["family"] in ("qwen3", "qwen3_moe"):  # heads are together wider than the model
        config["head_dim"] = 16 if config["dim"] % 64 else 64
    if parallel.pp > 1:
        config["n_layers"] = parallel.pp * parallel.stages_per_rank + 1
    seq = SEQ
    if cp > 1:
        seq = 24  # 2 cp has to divide it
    elif has_float8 or (tp > 1 and not HAS_2_13):
        seq = 16  # float8 takes whole blocks of 16
    model = meta_model(config_of(config), trainable=not lora)
    work = Work(model, parallel, BATCH, microbatch, seq)
    check_step(work, bits)
    config["rope_scaling"] = drawn["rope_scaling"]  # not above: no check asks, and models are kept
    for size in ("replicate", "shard", "stages_per_rank"):
        options[size] = getattr(parallel, size)
    given = case(config, microbatch, **options)
    given["packed"] = drawn["packed"]
    if lora:
        given["lora"] = lora | dict(base_bits=bits)
    if seq != SEQ:
        given["seq"] = seq
    if drawn["generate"]:
        given["generate"] = True
    return given


def is_possible(ranks: int, drawn: dict) -> bool:
    try:
        return bool(make_case(ranks, drawn))
    except UserError:
        return False


def drawn_quickly(ranks: int) -> list[dict]:
    """Return cases of a short draw that compute little, those that add most pairs first. What four
    ranks along tp compute is left to the slow tests, since DTensor takes long to begin."""
    quick = []
    for drawn in pairwise(OPTIONS, partial(is_possible, ranks), ranks, SHORT):
        given = make_case(ranks, drawn)
        layers = given["config"]["n_layers"] / drawn["pp"]
        is_quick = attentions(given, layers) <= MOST_ATTENTIONS
        if is_quick and drawn["tp"] < 4 and not drawn["compile"]:
            quick.append(drawn)
    return quick[: FAST[ranks]]


def drawn_slowly(ranks: int) -> list[dict]:
    """Return cases that cover all other pairs of a long draw, and every two-hundredth case of a
    random walk that starts anew each day."""

    def cost(drawn: dict) -> int:
        return 3 if drawn["compile"] else 1

    possible = partial(is_possible, ranks)
    walk = random_walk(OPTIONS, possible, f"{SEED} {ranks}")
    of_today = itertools.islice(walk, 200, 1000, 200)
    long = pairwise(OPTIONS, possible, ranks, LONG, cost=cost, covered=DRAWN[ranks])
    return [*of_today, *long]


def named(ranks: int, drawn: list[dict]) -> dict[str, tuple[int, dict]]:
    """Return name -> (ranks, case of exact.py) for the values of some cases."""
    cases = {}
    for values in drawn:
        name = f"{ranks} ranks: {case_name(values, OPTIONS)}"
        cases[name] = ranks, make_case(ranks, values)
    return cases


DRAWN = {ranks: drawn_quickly(ranks) for ranks in FAST}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
# Seldom drawn are a matrix that is tied and sharded twice, and biases without adapters in chunks;
# never, gradients of several DDP buckets and another loss.
TIED = PLAIN | dict(dp="fsdp", tp=2, tied=True, generate=True)
BIASED = PLAIN | dict(tp=2, async_tp=True, family="qwen2", microbatch=4)
NORMED_CASE = PLAIN | dict(tp=2, checkpointing="full", family="olmo2", microbatch=4)
NORMED_CASE |= dict(generate=True)
WINDOWED = PLAIN | dict(dp="fsdp", cp=2, family="olmo3", packed=True)
# Without experts --ep is refused, so that few draws have it.
EP = PLAIN | dict(dp="fsdp", ep=2, family="mixtral")
EP_2 = [
    EP | dict(microbatch=1, generate=True),
    EP | dict(tp=2, checkpointing="full", packed=True),
]
EP_4 = [
    EP | dict(dp="ddp", family="qwen3_moe", optimizer="muon"),
    EP | dict(pp=2, reshard="none"),
    EP | dict(tp=2, ep=4, cp=2, checkpointing="selective", microbatch=4, optimizer="muon"),
]
LATENTS = EP | dict(family="deepseek_v3", tp=2)
LATENTS_2 = LATENTS | dict(optimizer="muon", packed=True, rope_scaling=8.0, generate=True)
TAKEN = {  # all these cases by ranks
    1: DRAWN[1],
    2: [*DRAWN[2], BIASED, NORMED_CASE, WINDOWED, *EP_2, LATENTS_2],
    4: [*DRAWN[4], TIED, *EP_4, LATENTS | dict(pp=2)],
}
QUICK = {}
for ranks, drawn in TAKEN.items():
    QUICK |= named(ranks, drawn)
WIDE = ODD | dict(dim=240, ffn_dim=1400)
QUICK["2 ranks: several buckets"] = 2, make_case(2, PLAIN) | dict(config=WIDE)
for ranks in (1, 2):
    of_tp = make_case(ranks, PLAIN | dict(tp=ranks))
    QUICK[f"{ranks} ranks: tp={ranks} own loss"] = ranks, of_tp | dict(own_loss=True)

# Preferences on rows of pairs, with the adapters off in a second forward, or with all weights;
# sampled answers that were rewarded; and rows of pairs whose targets a teacher predicts.
OBJECTIVES = [
    (1, "sigmoid", "w1 w3", dict(microbatch=1, checkpointing="full")),
    (1, "rewards", "dora", dict(base_bits=4)),
    (2, "sigmoid", "dora", dict(dp="fsdp")),
    (2, "sigmoid", "dora", dict(tp=2, microbatch=4)),
    (2, "ipo", "none", dict(dp="fsdp", cp=2, microbatch=4)),
    (2, "sigmoid", "dora", dict(pp=2, schedule="gpipe", microbatch=1)),
    (2, "ipo", "none", dict(tp=2, ep=2, family="qwen3_moe", microbatch=4)),
    (2, "rewards", "none", dict(dp="fsdp", microbatch=1)),
    (1, "rewards", "none", dict(family="deepseek_v3", microbatch=1)),
    (2, "rewards", "none", dict(dp="fsdp", ep=2, family="mixtral")),
    (2, "rewards", "all", dict(tp=2, microbatch=4)),
    (2, "rewards", "none", dict(pp=2, schedule="gpipe", microbatch=1)),
    (1, "forward", "all", dict(microbatch=1, checkpointing="full")),
    (1, "reverse", "none", dict(tied=True)),
    (2, "forward", "none", dict(dp="fsdp", microbatch=1)),
    (2, "reverse", "none", dict(tp=2, tied=True, microbatch=4)),
    (2, "reverse", "none", dict(dp="fsdp", cp=2, microbatch=4)),
    (2, "reverse", "none", dict(dp="fsdp", ep=2, family="mixtral")),
    (2, "reverse", "none", dict(pp=2, schedule="interleaved", microbatch=1, tied=True)),
    (2, "top_k", "none", dict(tp=2, checkpointing="selective", microbatch=4)),
]
SLOWER_OBJECTIVES = [  # for the slow tests
    (2, "sigmoid", "none", dict(dp="fsdp", offload=True)),
    (2, "sigmoid", "none", dict(dp="fsdp", family="mixtral", checkpointing="full")),
    (2, "forward", "none", dict(dp="zero1")),
    (2, "top_k", "dora", dict(dp="ddp", base_bits=4)),
    (4, "forward", "none", dict(dp="fsdp", tp=2, tied=True)),
]


def cases_of(objectives: list[tuple]) -> dict[str, tuple[int, dict]]:
    cases = {}
    for ranks, objective, adapters, values in objectives:
        of_task = dict(packed=objective != "rewards", adapters=adapters)
        given = make_case(ranks, PLAIN | of_task | values)
        given |= dict(objective=objective, seq=24)
        cases[f"{ranks} ranks: {objective} {adapters} {values}"] = ranks, given
    return cases


QUICK |= cases_of(OBJECTIVES)


def of_objectives(cases: dict[str, tuple[int, dict]]) -> dict[str, tuple[int, dict]]:
    """Return some cases again as those of preferences or of a teacher; where rows are not packed,
    of rewards."""
    usable = []
    for name, (ranks, given) in cases.items():
        rounds = reference_of(given) is not None
        if not (rounds or "generate" in given):
            usable.append((name, ranks, given))
    found = {}
    losses = itertools.cycle([*LOSSES, *DISTILLED])
    for name, ranks, given in usable[::3]:
        objective = next(losses) if given["packed"] else "rewards"
        found[f"{name} {objective}"] = ranks, given | dict(objective=objective, seq=24)
    return found


@functools.cache
def slower_cases() -> dict[str, tuple[int, dict]]:
    """Return all others."""
    cases = {}
    for ranks in FAST:
        cases |= named(ranks, drawn_slowly(ranks))
    slower = {name: entry for name, entry in cases.items() if name not in QUICK}
    slower |= of_objectives(slower)
    slower |= cases_of(SLOWER_OBJECTIVES)
    compiled = [given for _, given in slower.values() if given["parallel"]["compile"]]
    for i, given in enumerate(compiled):  # most are traced and differentiated without kernels
        given["backend"] = "aot_eager_decomp_partition" if i % 4 else "inductor"
    return slower


def train_all(directory: Path, cases: dict[str, tuple[int, dict]], within=()) -> dict:
    """Train cases in one launch for each number of ranks."""
    results = {}
    for ranks in FAST:
        ours = {name: given for name, (n, given) in cases.items() if n == ranks}
        nproc = ranks if ranks > 1 else 0
        if ours:
            results |= exact.train(directory, nproc, ours, timeout=1800, within=within)
    return results


def reference_of(given: dict) -> dict | None:
    """Return the same case on one process for a case that rounds to fewer bits, which plain PyTorch
    does not. That it rounds as it should is left to test_float8.py and test_adamw.py."""
    parallel = {name: given["parallel"][name] for name in ("float8", "moments", "optimizer")}
    if parallel["float8"] == "none" and parallel["moments"] == "float32":
        return None
    return given | {"parallel": parallel, "steps": steps_of(given)}


def train_references(directory: Path, cases: dict[str, tuple[int, dict]]) -> dict:
    wanted = {}
    for _, given in cases.values():
        reference = reference_of(given)
        if reference:
            wanted[str(reference)] = reference
    return exact.train(directory, 0, wanted, timeout=1800) if wanted else {}


def assert_result(ranks: int, given: dict, result: dict, references: dict) -> None:
    """Assert that the result of a case equals its reference."""
    reference = reference_of(given)
    if reference:
        reference = references[str(reference)]
    assert_case(result, given, ranks, reference)


# What only slow cases have, since it takes long.
SLOW_VALUES = {"compile": {True}, "tp": {4}, "pp": {4}, "reshard": {"adapters"}}
SLOW_VALUES |= {"offload_activations": {True}, "adapters": {"w2", "latents", "latents, dora"}}
# ranks -> how many pairs of values occur together in some case. They may only rise.
PAIRS = {1: 1670, 2: 2049, 4: 2296}


@pytest.mark.parametrize("option", OPTIONS)
def test_fast_cases_have_every_value_of_an_option(option):
    of_objectives = [dict(adapters=adapters) | values for *_, adapters, values in OBJECTIVES]
    cases = itertools.chain(of_objectives, *TAKEN.values())
    taken = {case[option] for case in cases if option in case}
    assert {*OPTIONS[option]} - taken == SLOW_VALUES.get(option, set())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", FAST)
def test_pairs_of_values_occur_together(ranks):
    pairs = set()
    for drawn in (*TAKEN[ranks], *drawn_slowly(ranks)):
        pairs.update(itertools.combinations(drawn.items(), 2))
    assert len(pairs) >= PAIRS[ranks]


def test_config_names_every_schedule():
    told = FLAGS["schedule"].metadata["flag"].help
    assert all(f"{name}," in told for name in SCHEDULES)


def pytest_generate_tests(metafunc) -> None:
    if metafunc.function.__name__ == CASE_TEST:
        cases = [pytest.param(*given, id=name) for name, given in QUICK.items()]
        if asks_for_slow(metafunc.config, "exact"):  # drawing them takes a minute
            for name, given in slower_cases().items():
                cases.append(pytest.param(*given, id=name, marks=pytest.mark.slow))
        metafunc.parametrize("ranks, given", cases)


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Return the results of the selected cases, and of the references that they need."""
    cases = {}
    for item in request.session.items:
        if item.originalname == CASE_TEST:
            given = item.callspec.params
            cases[item.callspec.id] = given["ranks"], given["given"]
    directory = tmp_path_factory.mktemp("cases")
    return train_all(directory, cases), train_references(directory, cases)


def test_a_split_computes_what_one_process_computes(trained, request, ranks, given):
    results, references = trained
    name = request.node.callspec.id
    print(f"SEED={SEED} pytest -m 'slow or not slow' 'tests/test_exact.py::{CASE_TEST}[{name}]'")
    assert_result(ranks, given, results[name], references)
