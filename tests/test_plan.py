"""bench.py plan: which plans it lists, how it ranks and explains them, how it starts the best."""

import itertools
import json
import re
import shlex
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, launch, refused, slow, succeed
from exact import check_step
from test_roofline import measurement

import bench
from config import ParallelConfig, Work, flags_of, requested_parallel
from costs import search
from costs.machines import REACHED, assumed_machine
from costs.page import holds
from model import PRESETS, LlamaConfig
from perf.instruments import build_on_meta
from plumbing.parser import Parser
from runs.flags import add_finetuning_flags, add_pretraining_flags
from techniques.schedules import SCHEDULES

FROZEN = json.loads((ROOT / "tests/frozen_plans.json").read_text())
SETTINGS = (
    "dp replicate shard tp cp pp schedule stages_per_rank reshard checkpointing "
    "offload_activations microbatch"
).split()


def run(*args) -> str:
    return succeed("bench.py", "plan", *args).out


def command_in(out: str) -> str:
    return next(line for line in out.splitlines() if line.startswith("torchrun"))


def row_of(mesh: str, out: str) -> str:
    """Return the row of a strategy and mesh, such as `hsdp 2 x 4`."""
    (row,) = [line for line in out.splitlines() if line.startswith(f"{mesh}  ")]
    return row


def meshes_in(out: str) -> list[str]:
    """Return the first column of the table."""
    lines = out.splitlines()
    (head,) = [i for i, line in enumerate(lines) if line.startswith("strategy and mesh")]
    rows = itertools.takewhile(bool, lines[head + 1 :])
    return [row.partition("  ")[0] for row in rows]


@pytest.mark.parametrize("name", [slow(name) if "512" in name else name for name in FROZEN])
def test_the_best_plan_is_that_of_longer_formulas(name, monkeypatch):
    """frozen_plans.json has the plans within 3 % of the best, by formulas of twice as many lines,
    which followed each combination of techniques to the byte."""
    questions, parser, frozen = [], Parser(), FROZEN[name]
    monkeypatch.setattr(bench, "plan_cluster", lambda question, *_: questions.append(question))
    bench.add_plan_flags(parser)
    bench.plan(parser.parse_args(shlex.split(frozen["flags"])))
    best = min(questions[0].plans(), key=search.order)
    assert best.fits == bool(frozen["plans"])
    if best.fits:
        settings = vars(best.work.parallel) | {"microbatch": best.work.microbatch}
        assert " ".join(str(settings[name]) for name in SETTINGS) in frozen["plans"]


def test_a_plan_of_diloco_pays_for_its_outer_step_once_in_h_steps(tmp_path):
    """Each of two nodes sends 4 bytes for each of P / 8 parameters of a rank, twice (n - 1)/n."""
    given, rows = ("--model", "llama3.2-1b", "--gpus", 16, "--link", "1gbit", "--batch", 16), {}
    for every in (10, 20):
        file = tmp_path / f"{every}.json"
        out = run(*given, "--dp", "diloco", "--every", every, "--shard", 8, "--json", file)
        assert "--dp diloco --shard 8 " in out and f"--every {every}" in out
        rows[every] = min(json.loads(file.read_text()), key=lambda row: row["seconds"])
    seconds = 1.236e9 / 8 * 4 / 1.25e8
    assert rows[10]["seconds"] - rows[20]["seconds"] == pytest.approx(seconds / 20, rel=0.01)


def test_a_plan_lists_every_mesh_and_starts_the_best(tmp_path):
    file = tmp_path / "plans.json"
    out = run("--model", "llama3.1-8b", "--gpus", 16, "--top", 99, "--json", file)
    rows, sizes = meshes_in(out), (1, 2, 4, 8, 16)
    meshes = [(pp, tp, shard) for pp in sizes for tp in sizes[:-1] for shard in sizes
              if 16 // pp >= tp and 16 // pp // tp >= shard]  # fmt: skip
    assert len(set(rows)) == len(rows) == len(meshes)
    found = json.loads(file.read_text())
    assert {row["dp"] for row in found} == {"ddp", "zero1", "hsdp", "fsdp"}
    assert {row["checkpointing"] for row in found} == {"none", "selective", "full"}
    best = min((row for row in found if row["fits"]), key=lambda row: row["seconds"])
    assert best["pp"] == 1 and rows[0] == f"{best['dp']} {best['shard']}"
    command = command_in(out)
    assert "--nnodes 2 --nproc-per-node 8 --node-rank 0" in command
    assert f"--dp {best['dp']} " in command and f"--microbatch {best['microbatch']} " in command
    names = "dp", "replicate", "shard", "tp", "reshard", "checkpointing"
    sizes = {name: best[name] for name in names}
    parallel = ParallelConfig(**sizes, compile=True, dtype=torch.bfloat16)
    model = build_on_meta(PRESETS["llama3.1-8b"])
    memory = holds(Work(model, parallel, 32, best["microbatch"], 8192, on_gpu=True))
    assert best["bytes"] == memory and memory["peak"] < search.USABLE_FRACTION * 80e9
    assert "it needs more than 72 GB" in out and " tp\n" in out  # why others lose
    assert "--data TOKENS --tokenizer TOKENIZER --lr 0.0003 --out out/llama3.1-8b " in command
    table = out.partition("strategy and mesh")[2].partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 100


def test_the_flags_of_every_plan_ask_for_it():
    """Each plan of 8 GPUs in two nodes, in bfloat16 and with what is not a default; train.py takes
    it."""
    requested = ParallelConfig(dtype=torch.bfloat16, moments="bfloat16")
    model = build_on_meta(LlamaConfig(256, 8, 8, 8, 512))
    machine, wanted = assumed_machine("h100", "400gbit", 4), dict.fromkeys(search.FILTERS)
    plans = search.every_plan(Work(model, requested, 16, 1, 16384), 8, machine, wanted)
    works = [plan.work for plan in plans]
    parallels = {work.parallel for work in works}
    assert {1, 2} <= {parallel.cp for parallel in parallels}
    assert {parallel.schedule for parallel in parallels} == SCHEDULES.keys() - {"gpipe"}
    for parallel in parallels:
        parser = Parser()
        add_pretraining_flags(parser)
        args = parser.parse_args(flags_of(parallel).split())
        again = search.with_mesh_sizes(requested_parallel(args), 8, 4, args.shard)
        if again.reshard == "auto":  # nothing is sharded
            again = replace(again, reshard="weights")
        assert again == parallel
    for work in works:
        check_step(work, base_bits=16)


def test_zero1_wins_where_only_adamw_is_too_large():
    """8B on 8 GPUs of 150 GB: DDP's AdamW state alone takes 64 GB, ZeRO-1's 8 GB. Of the two, which
    have the same mesh, the table has the one that fits."""
    out = run("--model", "llama3.1-8b", "--gpus", 8, "--gpu", "989:150:3350:450", "--seq-len", 2048,
              "--shard", 1, "--tp", 1, "--pp", 1, "--batch", 8)  # fmt: skip
    row, command = row_of("zero1 8", out), command_in(out)
    assert row.endswith("the fastest")
    assert " --dp zero1 " in command and "--shard" not in command and "--reshard" not in command


@pytest.mark.slow
def test_8_bits_are_faster(tmp_path):
    """8B on 8 GPUs, as the command that is printed asks for."""
    speed, mfu = {}, {}
    for recipe in ("none", "tensorwise", "rowwise"):
        file = tmp_path / f"{recipe}.json"
        printed = run("--gpus", 8, "--shard", 8, "--tp", 1, "--pp", 1, "--json", file,
                      "--float8", recipe)  # fmt: skip
        speed[recipe] = json.loads(file.read_text())[0]["tokens_per_second_per_gpu"]
        mfu[recipe] = int(re.search(r"MFU (\d+)%", printed)[1])
        assert (f"--float8 {recipe}" in printed) == (recipe != "none")
    assert speed["none"] < speed["rowwise"] == speed["tensorwise"] < 2 * speed["none"]
    assert mfu["tensorwise"] > mfu["none"]  # a share of the peak in bfloat16


def test_adapters_beside_a_large_base_in_4_bits_on_one_gpu():
    """Which does not fit in 16 bits. The command is one that finetune_lora.py takes."""
    sizes = ("--lora", "--model", "llama3.1-70b", "--gpus", 1, "--per-node", 1, "--gpu", "h200")
    refused(launch("bench.py", "plan", *sizes), "nothing fits", "would fit: --base-bits 4, or")
    for kind in ("LoRA", "DoRA"):
        out = run(*sizes, "--base-bits", 4, *["--dora"] * (kind == "DoRA"))
        assert f"{kind} of rank 8 beside a base in 4 bits" in out
        assert "--lr 0.0001 " in command_in(out)
        parser = Parser()
        add_finetuning_flags(parser)
        args = parser.parse_args(shlex.split(command_in(out).split("finetune_lora.py ")[1]))
        assert args.base_bits == 4 and args.dora == (kind == "DoRA") and args.seq_len == 8192


def test_what_would_fit_on_a_small_card():
    sizes = ("--gpus", 1, "--per-node", 1, "--seq-len", 1024, "--batch", 1)
    for gpu, flags in (("rtx4090", "--lora, or"), ("989:12:1000:32", "--lora --base-bits 4, or")):
        error = launch("bench.py", "plan", *sizes, "--gpu", gpu)
        refused(error, "nothing fits", f"what would fit: {flags}")


def test_a_gpu_that_nobody_trained_on_says_so():
    for gpu, told in (("l40s", "no training on it"), ("mi300x", "only one training"), ("h100", "")):
        first, *others = run("--model", "llama3.2-1b", "--gpus", 8, "--gpu", gpu).splitlines()
        assert first.startswith(f"{gpu}: {told}" if told else "llama3.2-1b, 16 x 8192 tokens")
        assert any("Nine of ten published" in line for line in others) == (not told)


def test_what_is_asked_for_in_other_words():
    """--dp auto is any; replicas of one GPU are DiLoCo; a schedule needs a pipeline."""
    nothing = launch("bench.py", "plan", "--model", "llama3.1-405b", "--dp", "auto")
    refused(nothing, "nothing fits", "what would fit: --lora --base-bits 4, or --gpus 128")
    one_each = ("--gpus", 2, "--per-node", 1, "--model", "llama3.2-1b")
    assert "--dp diloco --shard 1 " in command_in(run(*one_each, "--dp", "diloco"))
    refused(launch("bench.py", "plan", "--schedule", "zero-bubble"), "give --no-compile")
    hsdp = launch("bench.py", "plan", "--model", "llama3.1-70b", "--gpus", 16, "--gpu", "h200",
                  "--dp", "hsdp")  # fmt: skip
    refused(hsdp, "what would fit: --moments bfloat16, or")


def test_a_slow_link_decides():
    """FSDP over all GPUs, the best on a fast link, waits for weights on a slow one."""
    fast, slow = (
        run("--model", "llama3.1-8b", "--gpus", 16, "--link", link, "--batch", 32, "--top", 99)
        for link in ("400gbit", "1gbit")
    )
    assert meshes_in(fast)[0] == "fsdp 16" and meshes_in(slow)[0] != "fsdp 16"
    assert row_of("fsdp 16", slow).endswith(" shard")


def test_a_run_takes_days_and_hours():
    """8B on 16 GPUs: days times GPUs are hours."""
    out = run("--gpus", 16, "--shard", 16, "--tp", 1, "--pp", 1, "--tokens", "1e12")
    (told,) = re.findall(r"1e\+12 tokens take (.*) days, (.*) GPU-hours\.\n", out)
    days, hours = (float(text.replace(",", "")) for text in told)
    assert hours == pytest.approx(days * 24 * 16, rel=0.01)
    (speed,) = re.findall(r"([\d,]+) tokens/s per GPU", out)
    assert hours == pytest.approx(1e12 / float(speed.replace(",", "")) / 3600, rel=0.01)


def test_a_plan_of_a_measured_cluster(tmp_path):
    file = tmp_path / "comm.json"
    file.write_text(json.dumps(measurement()))
    out = run("--measured", file)
    assert out.startswith("tiny, 4 x 128 tokens a step, float32, on 2 x cpu:")
    assert "cpu, measured: " in out and "Nine of ten" not in out
    assert "torchrun --nproc-per-node 2 train.py --model tiny" in out and "--no-compile" in out
    file.write_text(json.dumps(measurement() | {"compute": None}))
    refused(launch("bench.py", "plan", "--measured", file), "without --model", "bench.py comm")
    file.write_text(json.dumps(measurement()))
    refused(launch("bench.py", "plan", "--measured", file, "--dtype", "bfloat16"), "in float32")


def test_check_counts_what_was_predicted():
    """On GPUs with 11 MB, DDP does not fit. What a plain Llama sends and keeps is exact."""
    out = run("--model", "tiny", "--gpus", 4, "--gpu", "989:0.011:3350:450", "--seq-len", 128,
              "--batch", 4, "--shard", 4, "--tp", 1, "--check")  # fmt: skip
    assert " --dp fsdp " in out
    rows = [line.split("|")[1:4] for line in out.splitlines() if " bytes" in line]
    assert len(rows) >= 5
    for what, predicted, counted in rows:
        if "payload" in what or "parameters" in what or "gradients" in what:
            bytes_of = [text.split(" bytes")[0] for text in (predicted, counted)]
            assert bytes_of[0] == bytes_of[1], what
    assert re.search(r"peak is [+-]\d\.\d% off that of an emulated step", out)


def test_long_sequences_are_shared_or_offloaded(tmp_path):
    """8B and 131,072 tokens on 8 GPUs of 80 GB: the inputs of 32 blocks alone take 34 GB."""
    file = tmp_path / "plans.json"
    sizes = ("--gpus", 8, "--batch", 8, "--seq-len", 131072)
    out = run(*sizes, "--tp", 1, "--pp", 1)
    assert row_of("fsdp 8", out).endswith("the fastest")
    assert "full, on CPU" in row_of("fsdp 8", out)
    assert " selective " in row_of("fsdp 8, cp 8", out)  # attention by flash is slower
    not_shared = (*sizes, "--shard", 8, "--cp", 1)
    command = command_in(run(*not_shared, "--json", file))
    assert "--checkpointing full" in command and "--offload-activations" in command
    plans = {(row["checkpointing"], row["offload_activations"]): row
             for row in json.loads(file.read_text()) if row["dp"] == "fsdp"}  # fmt: skip
    assert plans.keys() == {("none", False), ("selective", False), ("full", False), ("full", True)}
    assert [plan["fits"] for plan in plans.values() if plan["offload_activations"]] == [True]
    assert not any(plan["fits"] for plan in plans.values() if not plan["offload_activations"])
    difference = plans["full", False]["bytes"]["peak"] - plans["full", True]["bytes"]["peak"]
    inputs = 30 * 131072 * 4096 * 2  # of 32, two stay; other moments of a step peak then
    assert 0.8 * inputs < difference < inputs
    assert "Of 1 plans" in run(*not_shared, "--offload-activations")


def test_packed_documents_are_faster(tmp_path):
    """Attention to 1,024 tokens takes an eighth of that to 8,192; in float32 it needs a mask, of
    which each block saves a row for each token."""
    file, found = tmp_path / "plans.json", {}
    given = "--gpus 16 --shard 16 --tp 1 --reshard weights --checkpointing none --microbatch 1"
    given = [*given.split(), "--seq-len", 8192, "--gpu", "989:400:3350:450", "--dtype"]
    for dtype in ("bfloat16", "float32"):
        for length in (0, 1024):
            out = run(*given, dtype, "--document-length", length, "--json", file)
            assert ("--document-mask" in out) == (length > 0)
            rows = json.loads(file.read_text())
            (found[dtype, length],) = [row for row in rows if row["dp"] == "fsdp"]
    config, two, packed = PRESETS["llama3.1-8b"], found["bfloat16", 0], found["bfloat16", 1024]
    saved = two["parts"]["products"] - packed["parts"]["products"]
    # Two sequences: half a square by cuDNN's kernel, an eighth of that by a flash kernel; forward,
    # and 2.5 times that in backward.
    flops = 3.5 * 2 * 8192 * 2 * 8192 * config.dim * config.n_layers
    seconds = [flops / (989e12 * REACHED[f"attention h100{kernel}"]) for kernel in ("", " cudnn")]
    assert saved == pytest.approx(seconds[1] - seconds[0] / 8)
    assert two["bytes"] == packed["bytes"]
    peaks = [found["float32", length]["bytes"]["activations"] for length in (0, 1024)]
    extra = config.n_layers * 8192 * 4 * (8192 + 2 * (config.dim - 1024))
    assert peaks[1] - peaks[0] == pytest.approx(extra)


def test_the_best_plan_starts(corpus, tmp_path):
    out = run(*"--model tiny --gpus 4 --per-node 4 --gpu 60:80:999:99 --dtype float32 --seq-len 32 "
              "--batch 8 --no-compile --pp 2 --schedule interleaved".split())  # fmt: skip
    given = {"TOKENS": corpus, "TOKENIZER": "bytes", "out/tiny": tmp_path / "run"}
    words = [str(given.get(word, word)) for word in command_in(out).split()]
    _, _, nproc, _, *command = words
    assert nproc == "4" and "--pp 2" in " ".join(command)
    more = ["--steps", 1, "--eval-every", 0]
    assert "step     1/1" in succeed("train.py", *command, *more, nproc=4).err
