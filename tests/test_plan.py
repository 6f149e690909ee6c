"""bench.py plan lists plans, ranks them, and starts the best; --dp auto takes what fits.

The best plans are those of frozen_plans.json, by longer formulas."""

import gc
import itertools
import json
import math
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, parsed_by, slow, step_of, succeed
from exact import check_step

import bench
import perf.plan
from config import ParallelConfig, Work, decided, flags_of
from costs import plans as all_plans
from costs import search
from costs.machines import GPUS, assumed_machine
from costs.page import holds
from costs.search import choose_parallel, fits_unsharded, what_would_fit, with_mesh_sizes
from model import PRESETS, LlamaConfig
from perf.instruments import build_on_meta, emulate
from plumbing.parser import parse
from runs.flags import Pretraining
from runs.setup import ratio_of_peaks
from techniques.optimizers import peak_rate
from techniques.schedules import SCHEDULES

FROZEN = json.loads((ROOT / "tests/frozen_plans.json").read_text())
SETTINGS = (
    "dp replicate shard tp cp pp schedule stages_per_rank reshard checkpointing "
    "offload_activations microbatch"
).split()


def run(*flags) -> str:
    """Return what bench.py plan prints with these flags."""
    words = shlex.split(" ".join(map(str, flags)))
    try:
        return bench.plan(parse(bench.Plan, words))
    finally:
        gc.unfreeze()  # what the command has frozen, as the only one of its process


def command_in(out: str) -> str:
    return next(line for line in out.splitlines() if line.startswith("torchrun"))


LARGE = re.compile("512|8B on 64|70B on 256")  # whose many plans take long


@pytest.mark.parametrize("name", [slow(name) if LARGE.search(name) else name for name in FROZEN])
def test_the_best_plan_is_that_of_longer_formulas(name, monkeypatch):
    """frozen_plans.json has the plans within 3 % of the best, by formulas of twice as many lines,
    which followed each combination of techniques to the byte. They did not know products saved,
    took attention to be repeated in compiled blocks, too, and an H200 for one of 141 GB."""
    monkeypatch.setitem(GPUS, "h200", GPUS["h200"]._replace(memory=141))
    questions, frozen = [], FROZEN[name]
    repeats_attention = property(lambda parallel: parallel.checkpointing == "full")
    monkeypatch.setattr(ParallelConfig, "repeats_attention", repeats_attention)
    monkeypatch.delitem(search.ACTIVATIONS, "products")
    monkeypatch.setattr("perf.plan.plan_cluster", lambda question, *_: questions.append(question))
    run(frozen["flags"])
    best = min(questions[0].plans(), key=all_plans.order)
    assert best.fits == bool(frozen["plans"])
    if best.fits:
        settings = vars(best.work.parallel) | {"microbatch": best.work.microbatch}
        assert " ".join(str(settings[name]) for name in SETTINGS) in frozen["plans"]


def test_a_plan_lists_every_mesh_and_starts_the_best(tmp_path, monkeypatch):
    monkeypatch.setattr(perf.plan, "MESHES", 99)
    file = tmp_path / "plans.json"
    out = run("--model llama3.1-8b --gpus 16 --json", file)
    found = json.loads(file.read_text())
    table = out.partition("\nstrategy and mesh ")[2].partition("\n\n")[0]
    rows = table.splitlines()[1:]
    powers = 1, 2, 4, 8, 16
    # tp stays within a node; copies of what pp, tp and shard make up take the other GPUs.
    meshes = itertools.product(powers, powers[:-1], powers)
    assert len(rows) == sum(16 % math.prod(mesh) == 0 for mesh in meshes)
    assert {row["dp"] for row in found} == {"ddp", "zero1", "hsdp", "fsdp"}
    assert {row["checkpointing"] for row in found} == {"none", "products", "selective", "full"}
    best = next(row for row in found if row["fits"])
    assert best["pp"] == 1 and rows[0].startswith(f"{best['dp']} {best['shard']}  ")
    command = command_in(out)
    assert "--nnodes 2 --nproc-per-node 8 --node-rank 0" in command
    assert f"--dp {best['dp']} " in command and f"--microbatch {best['microbatch']} " in command
    assert "--data TOKENS --tokenizer TOKENIZER --lr 0.0003 --out out/llama3.1-8b " in command
    names = "dp", "replicate", "shard", "tp", "reshard", "checkpointing"
    sizes = {name: best[name] for name in names}
    parallel = ParallelConfig(**sizes, compile=True, dtype=torch.bfloat16)
    model = build_on_meta(PRESETS["llama3.1-8b"])
    memory = holds(Work(model, parallel, 32, best["microbatch"], 8192, on_gpu=True))
    assert best["bytes"] == memory and memory["peak"] < search.USABLE_FRACTION * 80e9
    assert "it needs more than 72 GB" in out and " tp\n" in out  # why others lose


def test_flags_of_a_change_are_ones_that_exist():
    """There is --no-compile, but no --no-offload-activations."""
    before = ParallelConfig(checkpointing="full", offload_activations=True, compile=True)
    now = replace(before, checkpointing="selective", offload_activations=False, compile=False)
    assert flags_of(now, before) == "--checkpointing selective --no-compile"


def test_the_flags_of_every_plan_ask_for_it():
    """Each plan of 8 GPUs in two nodes, in bfloat16 and with what is not a default; train.py takes
    it."""
    requested = ParallelConfig(dtype=torch.bfloat16, moments="bfloat16")
    model = build_on_meta(LlamaConfig(256, 8, 8, 8, 512))
    machine, wanted = assumed_machine("h100", "400gbit", 4), dict.fromkeys(all_plans.FILTERS)
    plans = all_plans.every_plan(Work(model, requested, 16, 1, 16384), 8, machine, wanted)
    works = [plan.work for plan in plans]
    parallels = {work.parallel for work in works}
    assert {1, 2} <= {parallel.cp for parallel in parallels}
    assert {parallel.schedule for parallel in parallels} == SCHEDULES.keys() - {"gpipe"}
    for parallel in parallels:
        asked = parse(Pretraining, flags_of(parallel).split()).parallel
        again = with_mesh_sizes(decided(asked), 8, 4, asked.shard)
        if again.reshard == "auto":  # nothing is sharded
            again = replace(again, reshard="weights")
        assert again == parallel
    for work in works:
        check_step(work, base_bits=16)


def test_a_plan_has_the_rate_of_its_job():
    """That of techniques/optimizers.py, which preferences.py takes without --lr, too."""
    out = run("--lora preferences --model llama3.1-8b --gpus 8")
    assert peak_rate("preferences", build_on_meta(PRESETS["llama3.1-8b"])) == 5e-6
    assert "--lr 5e-06 " in command_in(out)


def test_adapters_beside_a_large_base_in_4_bits_on_one_gpu():
    """The command is one that finetune_lora.py takes."""
    out = run("--lora --dora --model llama3.1-70b --gpus 1 --gpu h200 --base-bits 4")
    assert "DoRA of rank 8 beside a base in 4 bits" in out and "--lr 0.0001 " in command_in(out)
    words = shlex.split(command_in(out))
    args = parsed_by(*words[words.index("finetune_lora.py") :])
    assert args.base_bits == 4 and args.dora and args.seq_len == 8192


def test_uncompiled_pipelines_are_not_predicted():
    """Published ones are beyond the error that other plans have; the output says so instead."""
    flags = "--gpus 8 --pp 2 --tp 1"
    assert "published speeds are within" in run(flags)
    eager = run(flags, "--no-compile")
    assert "Uncompiled pipelines are not predicted" in eager
    assert "published speeds are within" not in eager


def test_a_run_takes_days_and_hours():
    """8B on 16 GPUs: days times GPUs are hours."""
    out = run("--gpus 16 --shard 16 --tokens 1e12 --tp 1 --pp 1")
    (told,) = re.findall(r"1e\+12 tokens take (.*) days, (.*) GPU-hours\.\n", out)
    days, hours = (float(text.replace(",", "")) for text in told)
    assert hours == pytest.approx(days * 24 * 16, rel=0.01)
    (speed,) = re.findall(r"([\d,]+) tokens/s per GPU", out)
    assert hours == pytest.approx(1e12 / float(speed.replace(",", "")) / 3600, rel=0.01)


@pytest.mark.slow
def test_the_best_plan_starts(corpus, tmp_path):
    flags = "--model tiny --gpus 1x4 --gpu 60:80:999:99 --dtype float32 --seq-len 32"
    flags += " --batch 8 --no-compile --pp 2 --schedule interleaved"
    out = succeed("bench.py", "plan", *flags.split()).out
    given = {"TOKENS": corpus, "TOKENIZER": "bytes", "out/tiny": tmp_path / "run"}
    words = [str(given.get(word, word)) for word in command_in(out).split()]
    _, _, nproc, _, *command = words
    assert nproc == "4" and "--pp 2" in " ".join(command)
    more = ["--steps", 1, "--eval-every", 0]
    assert "step     1/1" in succeed("train.py", *command, *more, nproc=4).err


# -------------------------------------------------------------- --dp auto, and what would fit


def world_of(nodes: int, per_node: int):
    return SimpleNamespace(size=nodes * per_node, per_node=per_node, device=torch.device("cpu"))


ACCUMULATING = dict(dp="fsdp", reshard="auto", checkpointing="full")
TAKEN = [  # preset; nodes, and GPUs of each; GB of a GPU; what is asked for, and what is taken
    ("llama3.2-1b", (1, 8), 80, dict(dp="auto"), ("ddp", 8, 1)),  # 16 bytes x 1.2 G fit
    ("llama3.1-8b", (1, 8), 80, dict(dp="auto"), ("fsdp", 1, 8)),  # 128 GB do not; an eighth does
    ("llama3.1-8b", (4, 8), 80, dict(dp="auto"), ("hsdp", 4, 8)),
    ("llama3.1-8b", (4, 8), 16, dict(dp="auto"), ("fsdp", 1, 32)),  # not even in a node
    ("llama3.1-70b", (8, 8), 80, dict(dp="auto"), ("fsdp", 1, 64)),
    # Each rank of tp has an eighth of a copy; tp fills a node, and all else goes across.
    ("llama3.1-8b", (4, 8), 80, dict(dp="auto", tp=8), ("ddp", 4, 1)),
    ("llama3.1-70b", (4, 8), 80, dict(dp="auto", tp=8), ("fsdp", 1, 4)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="zero1"), ("zero1", 8, 1)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="fsdp", tp=2), ("fsdp", 1, 4)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="hsdp", tp=2), ("hsdp", 2, 2)),  # shards: within a node
    ("llama3.1-8b", (2, 4), 999, dict(dp="hsdp", shard=2), ("hsdp", 4, 2)),
    # An eighth of a copy takes 16 GB, whole gradients 32 GB; one microbatch has nothing to add up.
    ("llama3.1-8b", (1, 8), 60, ACCUMULATING | dict(microbatches=4), ("fsdp", 1, 8, "weights")),
    ("llama3.1-8b", (1, 8), 40, ACCUMULATING, ("fsdp", 1, 8, "weights")),
    ("llama3.1-8b", (1, 8), 40, ACCUMULATING | dict(microbatches=4), ("fsdp", 1, 8, "all")),
]


@pytest.mark.parametrize("preset, nodes, gigabytes, asked, expected", TAKEN)
def test_what_fits_is_taken(preset, nodes, gigabytes, asked, expected):
    model, world, asked = build_on_meta(PRESETS[preset]), world_of(*nodes), dict(asked)
    shard, microbatches = asked.pop("shard", None), asked.pop("microbatches", 1)
    batch = microbatches * world.size // asked.get("tp", 1)
    work = Work(model, ParallelConfig(**asked), batch, 1, 2048)
    parallel, why = choose_parallel(work, shard, world, gigabytes * 1e9)
    taken = parallel.dp, parallel.replicate, parallel.shard, parallel.reshard
    assert taken[: len(expected)] == expected
    copy = 16 * sum(p.numel() for p in model.parameters()) / parallel.tp
    assert f"take {copy / 1e9:.3g} GB" in why and f"may use {gigabytes} GB" in why


def test_samples_gather_weights_once_only_where_they_fit(monkeypatch, capsys):
    model = build_on_meta(LlamaConfig(256, 4, 4, 4, 768, vocab_size=2048))
    parameters = sum(p.numel() for p in model.parameters())
    state = parameters * (4 + 8) // 4  # weights and moments, over 4 ranks
    monkeypatch.setattr("costs.search.print_rank_zero", print)
    for room, fits in ((state + 4 * parameters + 10**4, True), (state + 4 * parameters, False)):
        monkeypatch.setattr("costs.search.usable_memory", lambda *_, room=room: room)
        world = SimpleNamespace(
            parallel=ParallelConfig(dp="fsdp", shard=4), device=None, per_node=4, minimum=int
        )
        assert fits_unsharded(step_of(model, world.parallel, 1, 1, 16), world) == fits
    gigabytes = 4 * parameters * 3 / 4 / 1e9
    assert f"for each token: a rank sends {gigabytes:.3g} GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "gigabytes, size, given, flags",
    [
        (150, 1, dict(microbatch=4, moments="bfloat16", checkpointing="products"),
         "--checkpointing selective"),
        (150, 1, dict(microbatch=2), "--checkpointing full --offload-activations"),
        (80, 8, dict(microbatch=2), "--dp fsdp --microbatch 1"),
        (80, 4, dict(microbatch=1, seq_len=131072, dp="fsdp", checkpointing="full",
                     moments="bfloat16", offload_activations=True), "--cp 4"),
        (150, 1, dict(microbatch=1, seq_len=65536, offload_activations=True),
         "--checkpointing full --moments bfloat16"),
        (80, 1, dict(microbatch=1), None),
        (120, 2, dict(batch=12, microbatch=6, pp=2, schedule="interleaved", stages_per_rank=2),
         "--microbatch 1"),  # which refuses microbatches of 4, for 3 are no multiple of 2
    ],
)  # fmt: skip
def test_flags_that_would_fit(monkeypatch, gigabytes, size, given, flags):
    """8B in bfloat16 on GPUs of so many GB; what is suggested fits."""
    monkeypatch.setattr("costs.search.usable_memory", lambda device: 0.9e9 * gigabytes)
    process = world_of(1, size)
    seq_len, microbatch = given.pop("seq_len", 4096), given.pop("microbatch")
    batch = given.pop("batch", 4 * size)
    parallel = ParallelConfig(**given | dict(dtype=torch.bfloat16, compile=True))
    parallel = with_mesh_sizes(parallel, size, size)
    model = build_on_meta(PRESETS["llama3.1-8b"])
    text = what_would_fit(Work(model, parallel, batch, microbatch, seq_len), process)
    if flags is None:
        assert text == "no flags make a step fit in 72 GB: use more GPUs, or a shorter --seq-len"
    else:
        assert f", and with {flags} " in text, text
        assert float(text.split()[-1]) <= 0.9 * gigabytes


def test_a_choice_that_barely_fits_is_counted():
    """DDP would fill 0.9 of the memory: where a count finds a third more, FSDP is taken. A choice
    with much room is not counted."""
    model, world, asked = build_on_meta(PRESETS["llama3.2-1b"]), world_of(1, 8), []
    work = Work(model, ParallelConfig(dp="auto"), 8, 1, 2048)
    peak = holds(replace(work, parallel=ParallelConfig(replicate=8)))["peak"]

    def count(choice: Work) -> float:
        asked.append(choice.parallel.dp)
        return 1.33 if choice.parallel.dp == "ddp" else 1.0

    for room, expected, counted in ((peak / 0.9, "fsdp", ["ddp"]), (2 * peak, "ddp", [])):
        asked.clear()
        parallel, _ = choose_parallel(work, None, world, room, count)
        assert (parallel.dp, asked) == (expected, counted)


@pytest.mark.slow
def test_a_step_is_counted_in_another_process():
    parallel = ParallelConfig(dp="fsdp", shard=4, compile=True)
    work = Work(build_on_meta(LlamaConfig(64, 3, 4, 2, 160, 512)), parallel, 4, 1, 256, on_gpu=True)
    eager = replace(work, parallel=replace(parallel, compile=False), on_gpu=False)
    _, counted = emulate(eager)
    assert ratio_of_peaks(work) == pytest.approx(counted["peak"] / holds(eager, 0)["peak"])
