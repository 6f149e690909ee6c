"""models/: a student's file is found, resumed or refused as docs/change.md says, in every script.

Gradients of every model are the slopes of its loss. That published models compute what transformers
computes is in test_model.py, test_formats.py and test_export.py; test_exact.py trains them under
every split."""

import json
import math
import random
import runpy
import shutil
from functools import partial

import pytest
import torch
from conftest import (
    CHANGES,
    ROOT,
    alone,
    launch,
    like,
    metrics,
    refused,
    same_with_gradients,
    slow,
    succeed,
)
from exact import GROUPED
from test_train import SIZES, as_flags, same_metrics
from test_train import flags as flags_of_run
from torch import nn

from config import ParallelConfig
from costs.shapes import units
from docs import side_by_side
from files.old_models import family_of_old
from model import PRESETS, FeedForward, LlamaConfig
from models.family import HERE, families, family_of, find_preset, presets
from plumbing.json_files import JsonFile
from plumbing.messages import UserError
from plumbing.shards import matrices_of
from runs.equal import check_gradients, describe, small_config
from techniques.muon import batches_of_matrices, stacks_on_rank
from techniques.optimizers import make_optimizer

OWN_SIZES = "--dim=32", "--n-layers=3", "--ffn-dim=48"  # others are of the file's preset
flags = partial(flags_of_run, sizes=OWN_SIZES, steps=4, save_every=2)
IN_DIRECTORY = "tests/workers/in_directory.py"


def test_a_students_file_trains_resumes_generates_and_is_tuned(corpus, sums, tmp_path):
    """As its user runs it. test_own_files.py trains all files of tests/changes."""
    name = "nope.py"
    shutil.copy(CHANGES / name, tmp_path)
    within = IN_DIRECTORY, tmp_path
    out, adapter = tmp_path / "run", tmp_path / "adapter"
    run = ["train.py", "--model", name, *flags(corpus, out, eval_every=4)]
    succeed(*within, *run, "--keep", 0)
    expected = metrics(out)
    shutil.rmtree(out / "step-00000004")
    split = dict(tp=2) if torch.__version__ >= "2.13" else dict(dp="fsdp")
    told = succeed(*within, *run, "--resume", *as_flags(split), nproc=2).out
    assert f"note: {name} is here no published model" in told
    same_metrics(metrics(out), expected)
    saved = json.loads((out / "step-00000004/config.json").read_text())
    assert saved["family"] == name and len(saved["digest"]) == 64 and len(saved["logits"]) == 4
    tuning = dict(
        init=out,
        data=sums,
        out=adapter,
        steps=2,
        seq_len=96,
        batch=4,
        eval_every=0,
        save_every=0,
        dtype="float64",
    )
    succeed(*within, "finetune_lora.py", *as_flags(tuning))
    said = ["--prompt", "1 and", "--max-new-tokens", 8, "--temperature", 0]
    succeed(*within, "generate.py", out, *said)
    succeed(*within, "generate.py", out, "--adapter", adapter, *said)
    export = "checkpoint.py", "export", out, tmp_path / "hf", "--format", "hf"
    refused(launch(*within, *export), f"no other program knows the models of {name}")


@pytest.mark.parametrize("masked", [False, True])
def test_a_sink_takes_its_share_of_the_softmax(masked):
    """Against the scores written out, with gradients."""
    attend_with_sinks = runpy.run_path(str(CHANGES / "sinks.py"))["attend_with_sinks"]
    torch.manual_seed(0)
    q = torch.randn(2, 9, 4, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 9, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    if masked:
        visible[5:, :3] = False
    keys, values = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
    scores = (q.transpose(1, 2) @ keys.mT / 6**0.5).masked_fill(~visible, -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(2, 4, 9, 1)], 3).softmax(3)
    expected = (with_sink[..., :-1] @ values).transpose(1, 2)
    found = attend_with_sinks(q, k, v, visible[None, None] if masked else None, sinks)
    same_with_gradients(found, expected, (q, k, v, sinks))


def test_a_file_is_found_again_or_missed_in_a_line(corpus, tmp_path):
    """Another's file under this name is told by its logits, the same one under another by its
    digest."""
    within = IN_DIRECTORY, tmp_path
    out, geglu, mine = (tmp_path / name for name in ("run", "geglu.py", "mine.py"))
    shutil.copy(CHANGES / "geglu.py", geglu)
    run = ["train.py", "--model", "geglu.py", *flags(corpus, out, steps=2)]
    succeed(*within, *run)
    geglu.rename(mine)
    generate = "generate.py", out, "--prompt", "1", "--max-new-tokens", 2
    refused(launch(*within, *generate), "there is no file geglu.py, in this folder or beside")
    same = ["train.py", "--model", "mine.py", *flags(corpus, out, steps=3), "--resume"]
    assert "resumed from" in succeed(*within, *same).out

    source = mine.read_text()
    geglu.write_text(f"{source}\n# a note\n")
    told = succeed(*within, *generate).err
    assert "note: mine.py" not in told  # the run goes on with the file that it was resumed with
    mine.write_text(f"{source}\n# a note\n")
    assert "note: mine.py was changed since it trained" in succeed(*within, *generate).err
    mine.write_text(source.replace("F.gelu", "F.silu"))
    told = succeed(*within, *generate).err
    assert "warning: mine.py computes other logits from the same weights than the code" in told


WITH_FIELDS = """
from dataclasses import dataclass

from model import LlamaConfig
from models.family import Family


@dataclass(frozen=True)
class Config(LlamaConfig):
    some: tuple | int = 2
    slope: float = 1.0
    window: int = 4
    large: int = 2**40


TINY = Config(32, 1, 2, 1, 48, some=-1, slope=-2.5)
MODEL = Family("mine", Config, {"tiny": TINY})
"""


def test_a_run_resumes_with_the_fields_of_a_students_file_that_it_began_with(corpus, tmp_path):
    """Given as flags or not, and whatever is their kind."""
    file = tmp_path / "mine.py"
    file.write_text(WITH_FIELDS)
    short = dict(seq_len=24, batch=8, eval_every=0, save_every=1)
    run = "train.py", "--model", file, *as_flags(short | dict(data=corpus, out=tmp_path / "run"))
    succeed(*run, "--steps=1", "--window=8")
    succeed(*run, "--steps=2", "--window=8", "--resume")
    refused(launch(*run, "--steps=3", "--resume"), "another model (window 8, not 4)")
    more = "--steps=3", "--window=8", "--large=5000000000"
    refused(launch(*run, *more, "--resume"), "(large 1099511627776, not 5000000000)")
    file.write_text(WITH_FIELDS.replace("-2.5", "2.5"))
    refused(launch(*run, "--steps=3", "--window=8", "--resume"), "(slope -2.5, not 2.5)")


GEGLU = (CHANGES / "geglu.py").read_text()
BAD_FILES = {
    "nothing": ("x = 1", "mine.py is no model: it needs MODEL = Family(...) with presets"),
    "raises": ("import nothing_like_this", "mine.py cannot be run: ModuleNotFoundError: No module"),
    "no presets": (
        "from models.family import Family\nfrom model import LlamaConfig\n"
        "MODEL = Family('mine', LlamaConfig)",
        "mine.py is no model: it needs MODEL",
    ),
    "a tuple": (
        WITH_FIELDS.replace("=-1", "=(1,)"),
        "mine.py: a checkpoint cannot hold some = (1,): write",
    ),
    "a flag's name": (
        WITH_FIELDS.replace("window", "steps"),
        "--steps is a flag already: give the model's field another name",
    ),
    # With these slips a Llama would be trained.
    "another build": (
        GEGLU.replace("return Geglu(self)", "return model.Llama(self)"),
        "no preset's model has a FeedForward: name it in attention_type",
    ),
    "no block_type": (
        GEGLU.replace("block_type = Block", "pass"),
        "no preset's model has a FeedForward: name it in attention_type",
    ),
    "another family": (
        GEGLU.replace('"geglu", GegluConfig', '"geglu", LlamaConfig'),
        "preset tiny is a GegluConfig, and its Family is of LlamaConfig",
    ),
}


@pytest.mark.parametrize("slip", BAD_FILES)
def test_a_file_that_is_no_model_is_refused(slip, tmp_path):
    source, problem = BAD_FILES[slip]
    (tmp_path / "mine.py").write_text(source)
    refused(launch("train.py", "--model", tmp_path / "mine.py"), problem)


def test_a_mended_file_is_loaded(tmp_path):
    file = tmp_path / "mended.py"
    file.write_text("x = 1")
    with pytest.raises(UserError, match="is no model"):
        find_preset(str(file))
    file.write_text(GEGLU)
    assert type(find_preset(str(file))).__module__ == "mended"


def test_models_that_are_not_found_are_refused():
    for name, problem in (
        ("llama9", "no preset 'llama9': choose one of tiny, small"),
        ("absent.py", "there is no file absent.py"),
        (f"{CHANGES}/nope.py:huge", "no preset 'huge': choose one of tiny"),
    ):
        with pytest.raises(UserError, match=problem):
            find_preset(name)


def test_a_file_is_also_found_beside_model_py(tmp_path, monkeypatch):
    found = find_preset(f"{CHANGES}/nope.py")
    monkeypatch.chdir(tmp_path)
    assert find_preset("tests/changes/nope.py") is found


def test_an_error_in_a_students_file_names_its_line():
    find_preset(f"{CHANGES}/nope.py")
    with pytest.raises(ZeroDivisionError) as error:
        exec(compile("1 / 0", "/a/nope.py", "exec"))
    assert describe(error.value).startswith("ZeroDivisionError in line 1 of nope.py: ")


def test_presets_belong_to_one_family():
    of_models = presets()
    assert PRESETS.items() <= of_models.items()
    find_preset(f"{CHANGES}/nope.py")  # which has a "tiny" of its own
    assert presets() == of_models
    for name, config in of_models.items():
        assert family_of(config).presets[name] is config
    assert len(of_models) == sum(len(families()[name].presets) for name in HERE)


def test_weights_of_another_family_are_refused(corpus, tmp_path):
    given = [*SIZES, "--data", corpus, "--seq-len", 24, "--batch", 8, "--eval-every", 0]
    succeed("train.py", *given, "--steps", 1, "--out", tmp_path / "llama")
    again = ["--init", tmp_path / "llama", "--model", "tiny-experts", *given]
    result = launch("train.py", *again, "--out", tmp_path / "experts")
    refused(result, "a model of family llama, not mixtral")


@pytest.mark.parametrize("switches, family", [
    ({}, "llama"),
    (dict(qkv_bias=True), "qwen2"),
    (dict(qk_norm=True), "qwen3"),
    (dict(n_experts=4), "mixtral"),
    (dict(n_experts=4, top_k=3, balance="none", qk_norm=True), "qwen3_moe"),
], ids=["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])  # fmt: skip
def test_switches_of_old_checkpoints_name_a_family(switches, family, tmp_path):
    off = dict(qk_norm=False, qkv_bias=False, n_experts=0, top_k=2, balance="bias")
    saved = GROUPED | off | switches
    (tmp_path / "config.json").write_text("{}")
    found = family_of_old(JsonFile(tmp_path / "config.json"), saved)
    assert found is families()[family]
    known = {"n_experts", "top_k", "balance"} & switches.keys()
    expected = like(LlamaConfig(**GROUPED), family, **{key: switches[key] for key in known})
    assert found.config(**saved) == expected


def test_an_old_mixture_of_models_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has qkv_bias beside others: no model here has both"):
        family_of_old(JsonFile(tmp_path / "config.json"), dict(qkv_bias=True, qk_norm=True))


def test_every_model_says_in_its_head_what_differs():
    for path in (ROOT / "models").glob("*.py"):
        if path.stem in families() and path.stem != "llama":
            assert "What differs from Llama: " in path.read_text().split('"""')[1], path


def test_a_layer_says_what_is_a_matrix():
    """A bias of experts [X, F] has two dimensions and is none; neither is a number for each head
    and feature."""
    model = like(LlamaConfig(**GROUPED), "mixtral", n_experts=4).build()
    experts = model.layers["1"].feed_forward.experts
    experts.w1.bias = nn.Parameter(torch.zeros(4, 40))
    found = matrices_of(model)
    assert "layers.1.feed_forward.experts.w1.weight" in found
    assert "layers.1.feed_forward.experts.w1.bias" not in found
    assert {"tok_embeddings.weight", "layers.0.attention.wq.weight"} <= found
    assert not {name for name in found if name.endswith(("norm.weight", "bias"))}
    optimizer = make_optimizer(model, alone(optimizer="muon"), weight_decay=0.1)
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and set(decayed["param_names"]) == found
    assert others["weight_decay"] == 0.0
    model(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)).backward()
    experts.w1.bias.grad = torch.ones(4, 40)
    optimizer.step()  # AdamW's first step is the learning rate, where Muon's would be one of rank 1
    torch.testing.assert_close(experts.w1.bias.detach(), torch.full((4, 40), -5e-3))


@pytest.mark.parametrize("ep", [1, 2])
def test_each_block_is_asked_what_it_holds(ep):
    """The first block is dense, and the others have experts."""
    config = like(LlamaConfig(**GROUPED), "mixtral", n_experts=4, n_layers=3)
    with torch.device("meta"):
        model = config.build()
        model.layers["0"].feed_forward = FeedForward(config)
    parallel = ParallelConfig("fsdp", shard=2, ep=ep)
    root, *of_blocks = units(model, parallel, shards=1)
    held = sum(unit.copies * unit.trained * (ep if unit.kind else 1) for unit in (root, *of_blocks))
    assert held == sum(p.numel() for p in model.parameters())
    assert sorted(unit.copies for unit in of_blocks) == ([1, 2] if ep == 1 else [1, 2, 2])
    assert sum(unit.kind == "expert_" for unit in of_blocks) == (ep > 1)
    matrices = [m for batch in batches_of_matrices(model, ParallelConfig()) for m in batch]
    stacks = stacks_on_rank(model, ParallelConfig())
    counted = sum(m.size for m in matrices) + sum(math.prod(shape) for shape in stacks)
    in_blocks = [p for name, p in model.layers.named_parameters() if "norm" not in name]
    assert counted == sum(p.numel() for p in in_blocks if p.ndim > 1)


@pytest.mark.parametrize("shapes", [2, slow(300)])
@pytest.mark.parametrize("family", HERE)
def test_gradients_of_any_shape_are_the_slopes_of_the_loss(family, shapes):
    """A small model is refused where they are not (runs/equal.py)."""
    draw = random.Random(f"{family} {shapes}")
    kind = families()[family].config
    for _ in range(shapes):
        heads = draw.choice([1, 2, 4])
        sizes = dict(
            n_heads=2 * heads,
            n_kv_heads=heads,
            dim=2 * heads * draw.choice([4, 6, 8]),
            n_layers=draw.choice([1, 2, 3]),
            ffn_dim=draw.choice([16, 40, 48, 96]),
        )
        config = kind(**families()[family].small | sizes, vocab_size=128)
        check_gradients(small_config(config, config.n_layers), torch.device("cpu"))


@pytest.mark.slow
def test_docs_models_md_has_the_table_of_today():
    assert side_by_side.table() in (ROOT / "docs/models.md").read_text()


def test_two_presets_are_set_side_by_side():
    found = side_by_side.compare(["tiny", "tiny-experts"])
    lines = [line.split() for line in found.splitlines()]
    assert ["n_experts", "-", "8"] in lines and ["ffn_dim", "288", "144"] in lines
    cached = 2 * 2 * 4 * 2 * 24  # bytes of k and v, L KV E
    assert f"bytes of a cached token {cached}, dim 96, n_layers 4" in found.splitlines()[-1]
