"""plan.py: the arithmetic of a plan, by hand; that it finds, sorts and explains; wrong input."""

import json

import pytest
import torch
from conftest import launch, refused, succeed

import plan
from cost import ROOM, memory, predict_traffic
from model import PRESETS, Llama, LlamaConfig, UserError
from parallel import Split

H100 = plan.machine_of("h100", "400gbit", 8)


def model_of(config: LlamaConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


def test_machines():
    assert (H100.peak, H100.memory, H100.bandwidth) == (989.4e12, 80e9, 3.35e12)
    assert H100.link == 50e9 and H100.node_link == 450e9
    by_numbers = plan.machine_of("312:80:2039:300", "12.5GB/s", 4)
    assert (by_numbers.peak, by_numbers.node_link, by_numbers.link) == (312e12, 300e9, 12.5e9)
    assert plan.link_speed("ndr") == plan.link_speed("400gbit") == plan.link_speed("50GB")
    assert plan.link_speed("200mbit") == 25e6
    with pytest.raises(UserError, match="no GPU 'h1000': choose one of h100"):
        plan.machine_of("h1000", "ndr", 8)
    with pytest.raises(UserError, match="no link 'fast': choose one of ndr"):
        plan.link_speed("fast")


def test_computation_of_a_block_by_hand():
    """A layer without a vocabulary to speak of: 7 matrices, of 2 FLOPs a number, three times."""
    config = LlamaConfig(64, 1, 4, 2, 160, vocab_size=1)
    machine = plan.Machine("round", 1e9, 1e9, 1e9, 1e9, products=0.5, attention=0.25)
    matrices = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160
    products = 10 * 3 * 2 * (matrices + 64) / 0.5e9
    attention = 10 * 3.5 * 2 * 2 * 64 * 128 / 2 / 0.25e9  # scores and sums, half the square
    seconds = plan.compute_time(config, Split(), 10, 128, machine, compiled=True)
    assert seconds["products"] == pytest.approx(products + attention)
    assert seconds["recompute"] == 0
    full = plan.compute_time(config, Split(checkpointing="full"), 10, 128, machine, True)
    again = 10 * (2 * matrices / 0.5e9 + 2 * 2 * 64 * 128 / 2 / 0.25e9)
    assert full["recompute"] == pytest.approx(again)
    halved = plan.compute_time(config, Split(tp=2), 10, 128, machine, True)
    assert halved["products"] == pytest.approx(seconds["products"] / 2)


def test_collectives_by_hand():
    """Of 1 GB, an all-gather over 8 GPUs of a node sends 7/8 over NVLink; an all-reduce twice that;
    over two nodes of 8 their 8 links together are slower than NVLink, and one alone is slowest."""
    node, both = Split(dp="fsdp", shard=8), Split(dp="fsdp", shard=16)
    across = Split(dp="hsdp", replicate=2, shard=8)

    def seconds(collective, dim, split):
        return plan.collective_time(collective, 1e9, dim, split, H100)

    assert seconds("all-gather", "shard", node) == pytest.approx(7 / 8 / 450, rel=0.02)
    assert seconds("all-gather", "shard", both) == pytest.approx(15 / 16 / 400, rel=0.05)
    assert seconds("all-reduce", "replicate", across) == pytest.approx(1 / 50, rel=0.01)


def test_what_was_measured_is_interpolated():
    groups = {"world": {"ranks": 2, "times": {"all-reduce": [(1000, 1.0), (3000, 2.0)]}}}
    machine = plan.Machine("cpu", 1, 1, 1, 1, per_node=2, measured=groups)
    for nbytes, expected in [(0, 1.0), (1000, 1.0), (2000, 1.5), (3000, 2.0), (6000, 4.0)]:
        took = plan.collective_time("all-reduce", nbytes, "replicate", Split(replicate=2), machine)
        assert took == pytest.approx(expected)


def measurement() -> dict:
    """As bench.py comm --model tiny writes it, with round numbers."""
    names = ("all-reduce", "all-gather", "reduce-scatter")
    times = {name: [(1024, 0.001), (1 << 20, 0.1)] for name in names}
    computed = {"model": "tiny", "config": vars(PRESETS["tiny"]), "dtype": "float32"}
    computed |= {"tokens": 256, "seq_len": 128, "update": 0.01}
    computed |= {"forward_backward": 0.2, "forward_backward_in_fsdp": 0.25}
    groups = {"world": {"ranks": 2, "times": times}}
    return {"device": "cpu", "backend": "gloo", "ranks": 2, "per_node": 2, "memory": 8e9,
            "groups": groups, "compute": computed}  # fmt: skip


def test_a_measured_machine_takes_what_was_measured():
    """A step of two such microbatches on two ranks, by hand."""
    machine = plan.measured_machine(measurement())
    model, split = model_of(PRESETS["tiny"]), Split(replicate=2)
    parts = plan.step_time(model, split, 2, 2, 128, machine)
    assert parts["products"] + parts["passes"] == pytest.approx(2 * 0.2)
    assert parts["optimizer"] == pytest.approx(0.01)
    ((calls, nbytes),) = predict_traffic(model, split, 2, 2, 128).values()
    assert parts["replicate"] == pytest.approx(0.1 * nbytes / (1 << 20), rel=0.01) and calls == 2
    fsdp = plan.step_time(model, Split(dp="fsdp", shard=2), 2, 2, 128, machine)
    assert fsdp["handling"] == pytest.approx(2 * 0.05) and parts["handling"] == 0


def test_a_plan_of_a_measured_cluster(tmp_path):
    file = tmp_path / "comm.json"
    file.write_text(json.dumps(measurement()))
    out = run("--measured", file)
    assert out.startswith("tiny, 4 x 128 tokens a step, float32, on 2 x cpu (measured:")
    assert "torchrun --nproc-per-node 2 train.py --model tiny" in out and "--no-compile" in out
    file.write_text(json.dumps(measurement() | {"compute": None}))
    refused(launch("bench.py", "plan", "--measured", file), "without --model", "bench.py comm")
    for text in ("[]", '{"compute": {"x": 1}}', "{"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"no result of bench\.py comm"):
            plan.read_measurement(file)


def test_groups_are_known_by_their_ranks_and_nodes():
    """4 ranks in 2 nodes: replicas and shards lie as measured; tp of 4 is the world."""
    ranks = {"world": 4, "node": 2, "across": 2}
    groups = {name: {"ranks": n} for name, n in ranks.items()}
    machine = plan.Machine("cpu", 1, 1, 1, 1, per_node=2, measured=groups)
    for dim, split, expected in [
        ("replicate", Split(replicate=4), "world"),
        ("shard", Split(dp="hsdp", replicate=2, shard=2), "node"),
        ("replicate", Split(dp="hsdp", replicate=2, shard=2), "across"),
        ("tp", Split(tp=4), "world"),
        ("shard", Split(dp="fsdp", shard=2, tp=2), "across"),
        ("shard", Split(dp="fsdp", shard=3), None),
    ]:
        assert plan.kind(*plan.group_of(dim, split, machine), machine) == expected


def test_gathering_hides_behind_computation_and_tensor_parallelism_does_not():
    model = model_of(PRESETS["llama3.1-8b"])
    fsdp = Split(dp="fsdp", shard=8, dtype=torch.bfloat16, compile=True)
    quick = plan.step_time(model, fsdp, 2, 1, 8192, H100)
    assert quick["shard"] < 0.05 * quick["products"]  # all but the edges is hidden
    slow = plan.step_time(model, fsdp, 2, 1, 8192, plan.replace(H100, node_link=1e9))
    sent = predict_traffic(model, fsdp, 1, 2, 8192).values()
    wire = 7 / 8 * sum(nbytes for _, nbytes in sent) / 1e9
    hidden = slow["products"] + slow["recompute"] + slow["passes"]
    assert slow["shard"] == pytest.approx(wire - hidden, rel=0.02)
    tp = plan.step_time(model, plan.replace(fsdp, shard=1, tp=8), 2, 1, 8192, H100)
    sent = predict_traffic(model, plan.replace(fsdp, shard=1, tp=8), 1, 2, 8192)
    wire = sum(nbytes for (dim, _), (_, nbytes) in sent.items() if dim == "tp") * 7 / 8 / 450e9
    assert wire < tp["tp"] < 1.2 * wire


def run(*args) -> str:
    return succeed("bench.py", "plan", *args).out


def test_a_plan_lists_every_mesh_and_starts_the_best(tmp_path):
    file = tmp_path / "plans.json"
    out = run("--model", "llama3.1-8b", "--gpus", 16, "--top", 99, "--json", file)
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")][2:]
    meshes = {f"{16 // tp // s} x {s} x {tp}" for tp in (1, 2, 4, 8) for s in (1, 2, 4, 8, 16)
              if 16 // tp % s == 0}  # fmt: skip
    assert set(rows) == meshes and len(rows) == len(meshes)
    found = json.loads(file.read_text())
    assert {row["checkpointing"] for row in found} == {"none", "selective", "full"}
    best = min((row for row in found if row["fits"]), key=lambda row: row["seconds"])
    assert rows[0] == f"{best['replicate']} x {best['shard']} x {best['tp']}"
    command = next(line for line in out.splitlines() if line.startswith("torchrun"))
    assert "--nnodes 2 --nproc-per-node 8 --node-rank 0" in command
    assert f"--dp {best['dp']} " in command and f"--microbatch {best['microbatch']} " in command
    split = Split(best["dp"], best["replicate"], best["shard"], best["tp"], best["reshard"],
                  best["checkpointing"], True, dtype=torch.bfloat16)  # fmt: skip
    model = model_of(PRESETS["llama3.1-8b"])
    share = 32 // split.replicate // split.shard
    held = memory(model, split, best["microbatch"] * 8192, share // best["microbatch"], fused=True)
    assert best["bytes"] == held and held["peak"] < ROOM * 80e9
    assert "needs" in out and "waiting for tp" in out  # why others lose


@pytest.mark.slow
def test_a_slow_link_decides():
    """FSDP over all GPUs, the best on a fast link, then waits for weights that cross it."""
    fast, slow = (
        run("--model", "llama3.1-8b", "--gpus", 16, "--link", link, "--batch", 32, "--top", 99)
        for link in ("400gbit", "1gbit")
    )
    assert "Best: 1 x 16 x 1" in fast and "Best: 1 x 16 x 1" not in slow
    row = next(line for line in slow.splitlines() if line.startswith("| 1 x 16 x 1 |"))
    assert "s of waiting for shard" in row


def test_check_counts_what_was_predicted():
    out = run("--model", "tiny", "--gpus", 4, "--gpu", "989:0.02:3350:450", "--seq-len", 128,
              "--batch", 4, "--shard", 4, "--check")  # fmt: skip
    rows = [line.split("|")[1:4] for line in out.splitlines() if " bytes" in line]
    assert len(rows) >= 5
    for what, predicted, counted in rows:
        if "peak" not in what:
            assert predicted == counted, what


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--gpu", "h1000"], ["no GPU 'h1000'", "h100", "989:80:3350:450"]),
        (["--link", "fast"], ["no link 'fast'", "400gbit"]),
        (["--link", "0gbit"], ["no link '0gbit'"]),
        (["--gpu", "0:80:3350:450"], ["no GPU '0:80:3350:450'"]),
        (["--batch", 12, "--tp", 1], ["--batch 12 cannot be shared by 8 parts"]),
        (["--gpus", 12], ["--gpus 12", "--gpus 16"]),
        (["--gpus", 64, "--batch", 4], ["--batch 4", "multiple of 8"]),
        (["--seq-len", 999999], ["--seq-len 999999", "131072"]),
        (["--model", "llama3.1-405b", "--gpus", 8], ["nothing fits", "GB of 72", "--gpus 128"]),
        (["--measured", "nowhere.json"], ["nowhere.json", "bench.py comm"]),
    ],
)
def test_wrong_input(args, parts):
    refused(launch("bench.py", "plan", *args), *parts)
