"""bench.py: its commands run and print their tables; how fast it is is no test's matter, but what
is counted is."""

import importlib.util
import json
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import launch, refused, succeed

import comm
import compare
from compare import Cost, agreement, choose_strategies, problem_with_files, those_that_fit
from cost import predict_traffic
from model import PRESETS, Llama, UserError
from parallel import Split


def test_limit():
    out = succeed("bench.py", "limit", "--model", "tiny", "--batch=1", "--seq-len=16",
                  "--repeats=2").out  # fmt: skip
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows[2:] == ["bare matrix products and attention", "transformers", "flatllama"]


@pytest.mark.slow
def test_loss():
    out = succeed("bench.py", "loss", "--tokens=2048", "--vocab-size=32000", "--dim=64").out
    plain, chunked = (float(line.split("|")[2].split()[0]) for line in out.splitlines()[2:])
    assert chunked < plain


@pytest.mark.slow
def test_compare():
    out = succeed("bench.py", "compare", "ddp", "wrong", "tp", "full", "--batch=2", "--seq-len=16",
                  "--repeats=2", nproc=2).out  # fmt: skip
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows[2:] == ["ddp", "wrong", "tp", "full"]
    assert "ddp sends 2.56 MB by 2 all-reduce over replicate" in out  # 0.64 M parameters
    assert "full sends 2.56 MB" in out and "all-gather over tp" in out


def test_compare_takes_all_that_fit(tmp_path):
    file, picture = tmp_path / "all.json", tmp_path / "all.png"
    drawn = importlib.util.find_spec("matplotlib") is not None
    out = succeed("bench.py", "compare", "--batch=4", "--seq-len=16", "--repeats=2", "--json", file,
                  *(["--plot", picture] if drawn else []), nproc=2).out  # fmt: skip
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads(file.read_text())
    assert {name: results[name] for name in ("model", "batch", "microbatch", "seq_len")} == {
        "model": "tiny", "batch": 4, "microbatch": 1, "seq_len": 16}  # fmt: skip
    assert (results["ranks"], results["per_node"], results["device"]) == (2, 2, "cpu")
    assert results["torch"] == torch.__version__ and results["lora"] is False and results["date"]

    splits = {  # and how many microbatches a rank has
        "ddp": (Split(replicate=2), 2),
        "fsdp": (Split(dp="fsdp", shard=2), 2),
        "fsdp-none": (Split(dp="fsdp", shard=2, reshard="none"), 2),
        "tp": (Split(tp=2), 4),
        "selective": (Split(replicate=2, checkpointing="selective"), 2),
        "full": (Split(replicate=2, checkpointing="full"), 2),
    }
    assert list(results["strategies"]) == list(splits)
    loss = loss_of_plain_model()
    with torch.device("meta"):
        model = Llama(PRESETS["tiny"])
    for name, (split, microbatches) in splits.items():
        result = results["strategies"][name]
        assert result["loss"] == pytest.approx(loss, rel=1e-5), name
        sent = sum(nbytes for _, nbytes in result["sends"].values()) - 2 * 40  # the step's sums
        predicted = predict_traffic(model, split, microbatches, 1, 16)
        assert sent == sum(nbytes for _, nbytes in predicted.values()), name
        assert len(result["seconds"]) == 2 and result["tokens_per_second"] > 0, name
        assert f"| {result['peak_bytes'] / 1e6:.2f} MB |" in out
        assert f"{name} sends {sent / 1e6:.2f} MB by" in out or len(predicted) > 1
    assert "losses of the first step agree to" in out and results["strategies"]["ddp"]["ratio"] == 1

    peaks = {name: result["peak_bytes"] for name, result in results["strategies"].items()}
    copy = 16 * sum(p.numel() for p in model.parameters())
    assert copy <= peaks["full"] <= peaks["ddp"] < 1.6 * copy
    # Besides its half, a rank of FSDP has gradients whole, and what it gathers.
    assert copy / 2 < peaks["fsdp"] < peaks["fsdp-none"] < peaks["ddp"]


def loss_of_plain_model() -> float:
    """Of tiny's first weights and the batch that every strategy is given, without bench.py."""
    model, draw = Llama(PRESETS["tiny"]), torch.Generator().manual_seed(0)
    model.init_weights()
    tokens = torch.randint(model.config.vocab_size, (4, 17), generator=draw)
    with torch.no_grad():
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.slow
def test_compare_adapters(tmp_path):
    file = tmp_path / "adapters.json"
    succeed("bench.py", "compare", "one", "ddp", "fsdp-adapters", "fsdp", "--lora", "--batch=2",
            "--seq-len=16", "--repeats=1", "--json", file, nproc=2)  # fmt: skip
    results = json.loads(file.read_text())
    one, ddp, adapters, fsdp = results["strategies"].values()
    assert results["lora"] and one["sends"] == {}
    losses = [result["loss"] for result in (ddp, adapters, fsdp)]
    assert losses == pytest.approx([one["loss"]] * 3, rel=1e-5)
    gathered = [result["sends"]["shard all-gather"][1] for result in (adapters, fsdp)]
    assert gathered[0] < gathered[1] / 2  # the base stays where it is
    assert one["peak_bytes"] > 4 * 640_000  # the base, of the rank that alone has it


def compare_args(**given) -> SimpleNamespace:
    usual = dict(strategies=[], model="tiny", batch=8, microbatch=1, seq_len=16, lora=False)
    return SimpleNamespace(**usual | dict(json=None, plot=None) | given)


def test_what_is_compared_by_default(monkeypatch):
    said = []
    monkeypatch.setattr(compare, "show", lambda text, **where: said.append(text))
    monkeypatch.setattr(compare, "device_room", lambda device, processes: 10**9)
    tiny, cpu, gpu = PRESETS["tiny"], torch.device("cpu"), torch.device("cuda")

    def chosen(nodes: int, per_node: int, device=cpu, **given) -> str:
        base = SimpleNamespace(size=nodes * per_node, per_node=per_node, device=device)
        return " ".join(choose_strategies(compare_args(**given), tiny, base))

    assert chosen(1, 1) == "one selective full"
    assert chosen(1, 2) == "ddp fsdp fsdp-none tp selective full"
    assert chosen(2, 1, lora=True) == "ddp fsdp fsdp-none fsdp-adapters tp selective full"
    assert chosen(1, 2, gpu) == "ddp fsdp fsdp-none tp selective full compiled"
    assert chosen(1, 2, strategies=["full", "wrong"]) == "full wrong" and not said
    assert chosen(2, 2) == "ddp fsdp fsdp-none hsdp selective full"
    assert len(said) == 1 and said[0].startswith("left out: tp (--tp 4 cannot share 2 key/value")
    assert chosen(1, 2, batch=3) == "tp" and said[1].startswith("left out: ddp (ddp: 2 parts")
    monkeypatch.setattr(compare, "device_room", lambda device, processes: 32 * 640_000)
    assert chosen(1, 2) == "ddp fsdp" and "; full (it takes 0.01" in said[2]
    monkeypatch.setattr(compare, "device_room", lambda device, processes: 10**6)
    with pytest.raises(UserError, match="nothing is left to compare: without ddp"):
        chosen(1, 2)


def test_strategies_that_fit_together():
    """All keep what they keep; what they compute with is needed once."""
    needs = {"a": (10, 5), "b": (10, 7), "c": (10, 1), "d": (3, 7)}
    assert those_that_fit(needs, 30)[0] == ["a", "b", "d"]
    assert those_that_fit(needs, 37)[0] == ["a", "b", "c"]
    assert list(those_that_fit(needs, 16)[1]) == ["b", "c", "d"]


def test_losses_that_do_not_agree_are_named():
    costs = {"one": Cost(7.0), "ddp": Cost(7.0000014), "tp": Cost(7.01)}
    assert agreement(costs) == (
        "losses of the first step DO NOT AGREE: tp 7.01000, but one 7.00000"
    )
    del costs["tp"]
    assert agreement(costs) == "losses of the first step agree to 2e-07"


def test_a_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # now an import raises ImportError
    asked = compare_args(plot=Path("comparison.png"))
    assert problem_with_files(asked) == "--plot needs matplotlib: pip install matplotlib"


def test_wrong_input():
    result = launch("bench.py", "speed")
    assert result.code == 2 and "invalid choice: 'speed'" in result.err
    refused(launch("bench.py", "compare", "ddp", "--batch=3", "--microbatch=2"), "--batch 3")
    refused(launch("bench.py", "compare", "ddp", "--seq-len=9999"), "--seq-len goes to 2048")
    refused(launch("bench.py", "compare", "ddp", "quick"), "expected one, ddp", "got 'quick'")
    refused(launch("bench.py", "compare", "fsdp-adapters"), "fsdp-adapters is for --lora")
    refused(launch("bench.py", "compare", "--json", "nowhere/x.json"), "no directory nowhere")
    refused(launch("bench.py", "compare", "--plot", "x.doc"), "--plot x.doc", ".png")
    refused(launch("bench.py", "compare", "--plot", "nowhere/x.png"), "no directory nowhere")


def test_comm(tmp_path):
    """Two ranks are one node: a single grouping, every collective in it, and one pair."""
    file = tmp_path / "comm.json"
    out = succeed("bench.py", "comm", "--sizes", "4096", "60", "--repeats=2", "--out", file,
                  nproc=2).out  # fmt: skip
    report = json.loads(file.read_text())
    assert report["device"] == "cpu" and report["backend"] == "gloo"
    assert (report["ranks"], report["per_node"], report["torch"]) == (2, 2, torch.__version__)
    assert datetime.fromisoformat(report["date"]).tzinfo
    assert list(report["groups"]) == ["world"] and report["groups"]["world"]["ranks"] == 2
    times = report["groups"]["world"]["times"]
    assert list(times) == ["all-reduce", "all-gather", "reduce-scatter", "broadcast", "send/recv"]
    for rows in times.values():
        assert [nbytes for nbytes, _ in rows] == [64, 4096]  # rounded up for 2 ranks to share
        assert all(seconds > 0 for _, seconds in rows)
    [(i, j, speed)] = report["pairs"]
    assert (i, j) == (0, 1) and speed > 0
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows == ["bytes", "--:", "64", "4,096"]
    assert "latency: all-reduce" in out and "no pair of ranks is slower than half" in out
    assert "the slow dimension" not in out  # there is one only


def test_comm_wrong_input(tmp_path):
    refused(launch("bench.py", "comm"), "torchrun --nproc-per-node 2 bench.py comm")
    refused(launch("bench.py", "comm", "--sizes", "0"), "--sizes", "'0'")
    nowhere = tmp_path / "no" / "comm.json"
    err = launch("bench.py", "comm", "--out", nowhere, nproc=2).err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: --out {nowhere}: there is no directory {nowhere.parent}"]
    assert "exitcode  : 2" in err and "world: all" not in err  # before anything was measured


def test_bus_bandwidth():
    """A million bytes in a millisecond, by the table in nccl-tests' doc/PERFORMANCE.md."""
    expected = {"all-reduce": 1.75e9, "all-gather": 0.875e9, "reduce-scatter": 0.875e9,
                "broadcast": 1e9, "send/recv": 1e9}  # fmt: skip
    for collective, speed in expected.items():
        assert comm.bus_bandwidth(collective, 8, 10**6, 1e-3) == pytest.approx(speed)
    assert comm.bus_bandwidth("all-reduce", 2, 10**6, 1e-3) == pytest.approx(1e9)


def test_pairs_to_try():
    assert comm.pairs_to_try(4, 2) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert len(comm.pairs_to_try(32, 8)) == 32 * 31 // 2
    many = comm.pairs_to_try(64, 8)
    assert len(many) == 63 + 56 and (7, 8) in many and (55, 63) in many


def all_pairs(size: int, speed) -> list[tuple[int, int, float]]:
    return [(i, j, speed(i, j)) for i, j in comm.pairs_to_try(size, size)]


@pytest.mark.parametrize("size", [4, 5, 8])
def test_slow_rank(size):
    pairs = all_pairs(size, lambda i, j: 1e6 if 3 in (i, j) else 1e7)
    slow = comm.slow_pairs(pairs, size)
    assert len(slow) == size - 1 and all(3 in pair[:2] for pair in slow)
    assert comm.common_rank(slow) == 3
    said = comm.pairs_in_words(pairs, size)
    assert said[0].startswith("ranks 0 and 3: 1.0 MB/s, where ")
    assert said[-1] == f"rank 3 pairs badly: it is in {size - 1} of these {size - 1} pairs"


def test_slow_links():
    """Across two nodes all is ten times slower than within, which is no fault of a link; two links
    are slow for their kind, and have no rank in common."""
    speeds = {(0, 1): 3e7, (2, 6): 2e6}
    usual = lambda i, j: 1e8 if i // 4 == j // 4 else 1e7  # noqa: E731
    pairs = all_pairs(8, lambda i, j: speeds.get((i, j), usual(i, j)))
    slow = comm.slow_pairs(pairs, per_node=4)
    assert slow == [(2, 6, 2e6, 1e7), (0, 1, 3e7, 1e8)]  # the worst for its kind first
    assert comm.common_rank(slow) is None
    assert comm.common_rank(slow[:1]) is None  # neither end is to blame more than the other
    assert len(comm.pairs_in_words(pairs, 4)) == 2


def test_many_slow_pairs():
    pairs = all_pairs(24, lambda i, j: 1.0 if {i, j} & {0, 1} else 1e6)
    said = comm.pairs_in_words(pairs, 24)
    assert len(said) == 9 and said[-1] == "and 37 more pairs below half of what is usual"
    same = all_pairs(3, lambda i, j: 1e6)
    assert comm.pairs_in_words(same, 3) == [
        "no pair of ranks is slower than half the median of its kind"
    ]


def test_slow_grouping():
    """Payload per second alone would call the world slowest; its links carry nearly twice it."""
    groups = {
        "world": {"ranks": 8, "times": {"all-reduce": [(64, 9.0), (1000, 0.7)]}},  # 2500 B/s
        "node": {"ranks": 4, "times": {"all-reduce": [(64, 9.0), (1000, 0.25)]}},  # 6000 B/s
        "across": {"ranks": 2, "times": {"all-reduce": [(64, 1e-6), (1000, 0.5)]}},  # 2000 B/s
    }
    assert comm.slow_grouping(groups) == ("across", "node", pytest.approx(3))
    assert comm.slow_grouping({"world": groups["world"]}) is None
