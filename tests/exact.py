"""Cases of training on a mesh, and the assertions that each is what plain.py computes.

Beside losses, gradients and weights: bytes are those that costs/page.py predicts, tokens those that
a plain model generates, and an adapter is saved without gathering anything else."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HAS_2_13, succeed
from plain import plain_training
from workers.train_cases import BATCH, SEQ, config_of, steps_of

from config import ParallelConfig, Work
from model import Llama, LlamaConfig
from perf.instruments import build_on_meta
from plumbing.messages import UserError
from runs.rules import check_parallel, check_work
from techniques import nf4
from techniques.decoding import generate

# Configurations for tp 1, 2 and 4, with sizes that ranks divide unevenly where tp allows it.
ODD = dict(dim=30, n_layers=2, n_heads=3, n_kv_heads=1, ffn_dim=46, vocab_size=101)
GROUPED = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=46, vocab_size=101)
FOUR_HEADS = dict(dim=40, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=44, vocab_size=101)

NORMED = "olmo2", "olmo3", "gemma3"  # families that normalize what a block adds to x


def case(config: dict, microbatch: int = 0, **parallel) -> dict:
    """Return a case as workers/train_cases.py reads it; `parallel` has fields of ParallelConfig."""
    found = dict(config=config, packed=False, parallel=parallel)
    if microbatch:
        found["microbatch"] = microbatch
    if parallel.get("tp", 1) > 1 and not HAS_2_13:
        found["seq"] = 16
    return found


def train(directory: Path, nproc: int, cases: dict, timeout: float = 300, within=()) -> dict:
    """Train all cases in one launch of `nproc` processes (0: without torchrun).

    Return results by name. `within` is what changed_copy returns, to run scripts of a copy."""
    given = directory / "cases.json"
    given.write_text(json.dumps([*cases.values()]))
    out = directory / "results.pt"
    script = (*within, "tests/workers/train_cases.py")
    succeed(*script, given, out, nproc=nproc, timeout=timeout)
    results = torch.load(out, weights_only=False)
    return dict(zip(cases, results, strict=True))


# ---------------------------------------------------------------------- cases that are drawn


def parallel_config(ranks: int, has_adapters: bool, dp: str, tp: int, cp: int, pp: int, **options):
    """Return a ParallelConfig for this number of ranks. Raises UserError for options that have no
    effect together, or that the project refuses."""
    data, rest = divmod(ranks, tp * pp)
    if rest or data % cp:
        raise UserError("these dimensions do not divide the ranks")
    if pp == 1 and options["schedule"] != "1f1b":
        raise UserError("without a pipeline, a schedule has no effect")
    if options["reshard"] == "adapters" and not has_adapters:
        raise UserError("without adapters, nothing is frozen")
    replicate = data
    if dp == "fsdp":
        replicate = 1
    elif dp == "hsdp":
        replicate = 1 if data % 2 else 2
    options["replicate"] = replicate
    options["shard"] = data // replicate
    options["stages_per_rank"] = 2 if options["schedule"] == "interleaved" else 1
    return ParallelConfig(dp=dp, tp=tp, cp=cp, pp=pp, **options)


@functools.cache
def meta_model(config: LlamaConfig, trainable: bool) -> Llama:
    """Return a model on meta; below adapters it is frozen."""
    return build_on_meta(config).requires_grad_(trainable)


def check_step(work: Work, base_bits: int) -> None:
    """Raise UserError for a step that train.py or finetune_lora.py refuses."""
    process = SimpleNamespace(size=work.parallel.size)
    check_parallel(work, None, process)
    techniques = [nf4.TECHNIQUE] if base_bits == 4 else []
    check_work(work, *techniques)


# ------------------------------------------------------------------------------- the comparison


def assert_same(result: dict, expected: dict, after_updates: float = 1e-12) -> None:
    """Assert equality to 1e-12, and of what follows an update to `after_updates`."""
    tolerance = 1e-12
    for ours, theirs in zip(result["rows"], expected["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
        tolerance = after_updates
    for what, tolerance in (("gradients", 1e-12), ("last", after_updates)):
        assert result[what].keys() == expected[what].keys()
        for name, value in expected[what].items():
            value = value.double()  # NF4 codes are integers
            difference = result[what][name] - value
            error = difference.norm() / value.norm()
            assert error < tolerance, (what, name, error)
    for name, value in expected["first"].items():
        ours = result["first"][name]
        rtol = 1e-14 if name.endswith("lora_magnitude") else 0  # ranks sum squares in another order
        assert torch.allclose(ours, value, rtol=rtol, atol=0), name


def assert_generation(result: dict, case: dict) -> None:
    """Assert that a split model generates the tokens of a plain one with the same weights, and that
    FSDP gathers each block once for all of them."""
    if "generate" not in case:
        return
    config = config_of(case["config"])
    model = config.build().double().eval()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(result["last"][name])
    expected = generate(model, [[1, 2, 3]], 4, temperature=0)
    assert result["tokens"] == expected
    parallel = ParallelConfig(**case["parallel"])
    is_gathered = parallel.shard > 1 and parallel.reshard != "none"
    assert result["sampling_gathers"] == is_gathered * result["layers"]


def assert_saved(result: dict, case: dict) -> None:
    """Assert that saving gathers the adapters and no more; there may be none."""
    size = 0
    for name, factor in result["adapters"].items():
        trained = result["last"][name]
        assert torch.equal(factor, trained)
        size += factor.nbytes
    parallel = ParallelConfig(**case["parallel"])
    in_parts = parallel.shard > 1 or parallel.tp > 1  # by both, a factor is gathered twice
    assert result["saving_bytes"] <= in_parts * 2.2 * size


def assert_traffic(result: dict, case: dict, nproc: int) -> None:
    """Assert that calls and payload of each collective are the predicted ones, but for the number
    of DDP's buckets, and for how FSDP pads rows of which tp has made parts. A loss of one's own
    may send more."""
    if case.keys() & {"own_loss", "objective"}:
        return
    parallel = ParallelConfig(**case["parallel"])
    expected = dict(result["predicted"])
    if nproc > 1:  # a step also gathers 7 scalars of a rank, in a group named by its dimension
        group = "world"
        for dim in ("pp", "replicate", "shard", "tp"):
            if getattr(parallel, dim) == nproc:
                group = dim
        calls, nbytes = expected.get((group, "all-gather"), (0, 0))
        expected[group, "all-gather"] = calls + 1, nbytes + nproc * 56
    assert result["sent"].keys() == expected.keys()
    within = 0.05 if parallel.tp > 1 and parallel.shard > 1 else 1e-12
    for key, (calls, nbytes) in result["sent"].items():
        expected_calls, expected_bytes = expected[key]
        assert nbytes == pytest.approx(expected_bytes, rel=within), key
        assert calls == expected_calls or parallel.strategy.wrapper == "ddp", key


def assert_reads(result: dict, case: dict) -> None:
    """Assert how often the host reads what experts get, in each layer that has any: in a microbatch
    once for each stack of matrices, as no kernel multiplies by all of a stack on a CPU, and once
    for what ranks send. Where backward computes forward again, it reads nothing."""
    if not config_of(case["config"]).n_experts or "objective" in case:
        return
    ranks = ParallelConfig(**case["parallel"])
    assert result["reads"] == microbatches_of(case, ranks) * (3 + (ranks.ep > 1))


def microbatches_of(case: dict, ranks: ParallelConfig) -> int:
    share = BATCH // (ranks.replicate * ranks.shard // ranks.cp)
    return share // case.get("microbatch", share)


def attentions(case: dict, layers: float) -> float:
    """Return the attention forwards of a step in so many layers: one for each microbatch, twice as
    many with full checkpointing of uncompiled blocks, and again with cp, where a rank has two
    chunks of a sequence."""
    parallel = ParallelConfig(**case["parallel"])
    times = 2 if parallel.repeats_attention else 1
    chunks = 2 if parallel.cp > 1 else 1
    return times * chunks * microbatches_of(case, parallel) * layers


def assert_trained(result: dict, case: dict, reference: dict | None = None) -> None:
    """Assert that a case has trained as plain PyTorch does, or as a `reference`."""
    if reference:
        assert_same(result, reference)
        return
    optimizer = case["parallel"].get("optimizer", "adamw")
    given = dict(
        config=case["config"],
        packed=case["packed"],
        lora=case.get("lora"),
        own_loss=case.get("own_loss", False),
        seq=case.get("seq", SEQ),
        optimizer=optimizer,
        objective=case.get("objective"),
        steps=steps_of(case),
        parallel={"ep": case["parallel"].get("ep", 1)},  # for the teacher's family
    )
    expected = plain_training(json.dumps(given))
    # Newton-Schulz and the singular value decomposition agree to fewer digits. Where outputs are
    # normalized, plain PyTorch has norms that differ by 6e-12 once a weight differs by 2e-16.
    is_exact = optimizer == "adamw" and case["config"].get("family") not in NORMED
    assert_same(result, expected, 1e-12 if is_exact else 1e-10)


def assert_case(result: dict, case: dict, nproc: int, reference: dict | None = None) -> None:
    """Make all comparisons above that apply. A `reference` takes the place of plain PyTorch."""
    assert_trained(result, case, reference)
    assert_generation(result, case)
    assert_saved(result, case)
    assert_reads(result, case)
    compiled = case["parallel"].get("compile")
    # Experts run between two graphs; with selective checkpointing around them, in none.
    if compiled and config_of(case["config"]).n_experts:
        return
    assert result["attentions"] == attentions(case, result["layers"])
    if compiled:  # all blocks share a graph; with LoRA the first has another
        expected = 2 if "lora" in case else 1  # since its input needs no gradient
        graphs = result["graphs"]["unique_graphs"]
        # Blocks without a window have graphs of their own, and so have bases and teachers.
        most = 2 * expected if config_of(case["config"]).windows else expected
        assert expected <= graphs <= most or "objective" in case
        assert not result["breaks"]
    else:
        assert_traffic(result, case, nproc)
