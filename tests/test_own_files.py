"""Changes that courses ask for, each a student's file or a patch in tests/changes, on every split.

Each is what plain PyTorch computes of it, to 1e-12, or is refused in a line, as the table says: in
training, with LoRA, in generation, and resumed on other ranks."""

import json

import pytest
from conftest import CHANGES, changed_copy, launch, needs_2_13, refused, succeed
from exact import assert_generation, assert_trained, case, train
from test_models import flags
from workers.train_cases import SIZES_OF_FILES, build

from finetune_lora import targets_in

SPLITS = {  # of two ranks
    "ddp": dict(replicate=2),
    "fsdp": dict(dp="fsdp", shard=2, checkpointing="selective"),
    "tp": dict(tp=2),
    "pp": dict(pp=2, checkpointing="full"),
    "cp": dict(cp=2, dp="fsdp", shard=2),
}
OF_EXPERTS = {"ep": dict(ep=2, replicate=2), "tp with ep": dict(tp=2, ep=2)}
WITH_ADAPTERS = {"fsdp": dict(dp="fsdp", shard=2), "tp": dict(tp=2)}
SIZES = dict(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=46, vocab_size=101)
NEEDS_A_MASK = {"cp": "need a mask: leave out --cp"}
OTHER_OUTPUT = "first in forward: the output of layers."
REFUSED = {  # change -> split -> part of the line that refuses it
    "sinks.py": NEEDS_A_MASK,
    "soft_cap.py": NEEDS_A_MASK,
    "alibi.py": {"tp": OTHER_OUTPUT, "cp": "attend has no mask here"},
    "learned_positions.py": {"pp": "positions.weight belongs to no stage of a pipeline"},
    "shared_expert.py": {"tp": "--tp 2 with experts needs --ep 2"},
    "value_residual": {"pp": OTHER_OUTPUT},
}
FILES = sorted(path.name for path in CHANGES.glob("*.py"))
PATCHES = {  # edits, so that rows of the cases have both kinds of tokens
    "value_residual": {},
    "position_weights": {"in_documents < 64": "in_documents < 5"},
}
pytestmark = [pytest.mark.slow, needs_2_13]


def case_of(change: str, **parallel) -> dict:
    config = SIZES | SIZES_OF_FILES.get(change, {})
    if change in FILES:
        config["family"] = str(CHANGES / change)
    found = case(config, 2, **parallel) | dict(seq=16, steps=2)  # which --cp 2 divides
    return found | dict(generate=True, may_be_refused=True)


def with_adapters(change: str, **parallel) -> dict:
    """Return a case of fine-tuning, which starts as train.py does."""
    found = case_of(change, **parallel)
    model = build(found["config"])
    # Experts have no adapters.
    asked = ("wq", "wk", "wv", "wo") if model.config.n_experts else ()
    lora = dict(rank=3, alpha=16, targets=targets_in(model, asked))
    del found["generate"], found["may_be_refused"]
    return found | dict(lora=lora)


def cases_of(change: str) -> tuple[dict, dict]:
    """Return the cases of one process and those of two, by the change and the split."""
    alone = {(change, "one"): case_of(change), (change, "adapters"): with_adapters(change)}
    together = {}
    splits = SPLITS | OF_EXPERTS if change == "shared_expert.py" else SPLITS
    for split, parallel in splits.items():
        together[change, split] = case_of(change, **parallel)
    for split, parallel in WITH_ADAPTERS.items():
        if split not in REFUSED.get(change, {}):
            together[change, f"adapters, {split}"] = with_adapters(change, **parallel)
    return alone, together


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict:
    """Return each case and its result. Two launches train those of all files, since processes take
    longer to start than to train a case."""
    alone, together = {}, {}
    for file in FILES:
        for all_cases, cases in zip((alone, together), cases_of(file)):
            all_cases |= cases
    results = train(tmp_path_factory.mktemp("one"), 0, alone, timeout=1500)
    results |= train(tmp_path_factory.mktemp("two"), 2, together, timeout=1500)
    return {key: (given, results[key]) for key, given in (alone | together).items()}


def assert_exact_or_refused(change: str, trained: dict, alone: dict | None = None) -> None:
    """Compare all cases of a change with plain PyTorch or, if given, with results of one process;
    generation with its cache must compute what training does, of which a note would tell."""
    wrong = {}
    for (of, split), (given, result) in trained.items():
        if of != change:
            continue
        refusal = result.get("refused", "")
        expected = REFUSED.get(change, {}).get(split, "")
        if expected or refusal:
            if not (expected and expected in refusal):
                wrong[split] = refusal or "not refused"
            continue
        reference = alone and alone[change, "adapters" if "lora" in given else "one"]
        try:
            assert result.get("notes", "") == ""
            assert_trained(result, given, reference)
            if not alone:  # whose weights a plain model can have
                assert_generation(result, given)
        except AssertionError as error:
            wrong[split] = str(error)
    assert wrong == {}


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_exact_or_refused(file, trained):
    assert_exact_or_refused(file, trained)


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_is_exact_or_refused(patch, tmp_path):
    within = changed_copy(tmp_path / "copy", patch, PATCHES[patch])
    alone, together = cases_of(patch)
    of_one = train(tmp_path, 0, alone, within=within)
    of_two = train(tmp_path, 2, together, within=within, timeout=600)
    compared = {key: (given, of_two[key]) for key, given in together.items()}
    assert_exact_or_refused(patch, compared, of_one)


@pytest.mark.parametrize("file", [file for file in REFUSED if file in FILES])
def test_a_run_of_it_ends_with_that_line(file, corpus, tmp_path):
    for split, line in REFUSED[file].items():
        given = flags(corpus, tmp_path / split, **{split: 2})
        refused(launch("train.py", "--model", CHANGES / file, *given, nproc=2), line)


def test_a_file_resumes_on_other_ranks(tmp_path):
    """With the losses and gradient norms of the run that was not interrupted."""
    worker = "tests/workers/any_to_any.py"
    resumed = {}
    for file in FILES:
        layout = "fsdp2" if "tp" in REFUSED.get(file, {}) else "tp2"
        resumed[f"{file}:one"] = f"{file}:one>{layout}"
    succeed(worker, tmp_path, *resumed, timeout=600)
    succeed(worker, tmp_path, *resumed.values(), nproc=2, timeout=600)
    for works in resumed.items():
        before, after = (json.loads((tmp_path / f"{work}.json").read_text()) for work in works)
        for row, expected in zip(after, before, strict=True):
            assert row == pytest.approx(expected, rel=1e-10), works
