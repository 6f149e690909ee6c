"""Eight changes that people make in class: seven are patches in tests/changes, and ZeRO-1 is in the
code. Applied to a copy of the project, each is exact in every parallel configuration or refused."""

import math
import re
import shutil
import subprocess
import sys
from functools import partial
from textwrap import indent
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    CHANGES,
    ROOT,
    changed_copy,
    hugging_face_config,
    launch,
    metrics,
    refused,
    slow,
    succeed,
)
from exact import GROUPED, assert_attentions, assert_same, assert_traffic, case, train
from test_model import to_hugging_face
from test_train import flags
from torch.func import functional_call
from workers.lion_reference import plain_lion
from workers.train_cases import batch_of

from model import IGNORE, FeedForward, Llama, LlamaConfig

NAMES = sorted(path.stem for path in CHANGES.glob("*.patch"))
CONFIG = LlamaConfig(**GROUPED)

CONSTANTS = {"sliding_window": {"WINDOW = 64": "WINDOW = 3"}}  # other ones in a short test
FLAGS = {"lion": {"optimizer": "lion"}, "cosine": {"decay": "cosine"}}
UNPREDICTED = ("experts", "z_loss")  # send more than costs/traffic.py says
STILL_A_LLAMA = ("z_loss", "lion", "cosine")
WEIGHTS = {"lion": plain_lion}  # that training should end with

CASES = {
    1: {
        "accumulating": case(GROUPED, 1),
        "selective": case(GROUPED, checkpointing="selective"),
        "full": case(GROUPED, checkpointing="full"),
    },
    2: {
        "ddp": case(GROUPED, dp="ddp", replicate=2),
        "zero1": case(GROUPED, 1, dp="zero1", replicate=2),
        "fsdp": case(GROUPED, 1, dp="fsdp", shard=2),
        "tp": case(GROUPED, dp="ddp", tp=2),
        "tp selective": case(GROUPED, 4, dp="ddp", tp=2, checkpointing="selective"),
    },
    4: {
        "fsdp tp": case(GROUPED, dp="fsdp", shard=2, tp=2),
        "fsdp tp full": case(GROUPED, 1, dp="fsdp", shard=2, tp=2, checkpointing="full"),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_change_applies_and_is_as_long_as_docs_change_md_says(name):
    patch = CHANGES / f"{name}.patch"
    subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)
    lines = re.findall(r"^([+-])(?!\1\1 )", patch.read_text(), re.MULTILINE)
    length = f"+{lines.count('+')} -{lines.count('-')}"
    page = (ROOT / "docs/change.md").read_text()
    assert f"[{name}](../tests/changes/{name}.patch), {length}" in page


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def changed(name, tmp_path_factory):
    """The first arguments of `launch` for a script of the project with this change."""
    return changed_copy(tmp_path_factory.mktemp(name), name, CONSTANTS.get(name))


def test_a_changed_project_has_all_names_and_flags(name, changed):
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", changed[1]]
    subprocess.run(ruff, check=True)
    succeed(*changed, "train.py", "--help")


@pytest.mark.slow
def test_every_configuration_computes_the_same(name, changed, tmp_path):
    expected = None
    for nproc, cases in CASES.items():
        for options in cases.values():
            options |= {"flags": FLAGS.get(name, {}), "generate": True}
        for label, result in train(tmp_path, nproc, cases, within=changed).items():
            print(label)
            if not expected and name in WEIGHTS:
                for parameter, weight in WEIGHTS[name](GROUPED).items():
                    error = (result["last"][parameter] - weight).norm() / weight.norm()
                    assert error < 1e-12, (parameter, error)
            expected = expected or result
            assert_same(result, expected)
            assert_attentions(result, cases[label])
            assert result["tokens"] == expected["tokens"]
            if name not in UNPREDICTED:
                assert_traffic(result, cases[label], nproc)


@pytest.mark.slow
def test_it_trains_and_resumes_and_generates_and_is_exported_or_refused(
    name, changed, corpus, tmp_path
):
    out, exported = tmp_path / "run", tmp_path / "exported"
    given = flags(corpus, out, steps=6, save_every=3, eval_every=3, **FLAGS.get(name, {}))
    succeed(*changed, "train.py", *given)
    expected = metrics(out)
    if name == "cosine":  # (1 + cos 2x) / 2 is cos² x; the first of two warmup steps is lower
        rates = [0.5, *(math.cos(math.pi * step / 14) ** 2 for step in range(2, 7))]
        assert [row["lr"] for row in expected] == pytest.approx([0.01 * rate for rate in rates])
    shutil.rmtree(out / "step-00000006")
    succeed(*changed, "train.py", *given, "--resume", "--dp", "fsdp", nproc=2)
    for ours, theirs in zip(metrics(out), expected, strict=True):
        for key in {"loss", "grad_norm", "lr", "val_loss"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12), key
    succeed(*changed, "generate.py", out, "--prompt", "1 and", "--max-new-tokens", 20)
    export = launch(*changed, "checkpoint.py", "export", out, exported, "--format", "hf")
    if name in STILL_A_LLAMA:
        assert export.codes == [0], export.err
    else:
        refused(export, "Llama")


@pytest.mark.parametrize("name", ["gelu", *map(slow, (name for name in NAMES if name != "gelu"))])
def test_adapters_of_a_changed_model_can_be_used(name, corpus, sums, tmp_path):
    """Trained, resumed on two ranks, merged and generated from; or refused before they are."""
    changed = changed_copy(tmp_path / "copy", name, CONSTANTS.get(name))
    base, out = tmp_path / "base", tmp_path / "adapter"
    succeed(*changed, "train.py", *flags(corpus, base, steps=1, **FLAGS.get(name, {})))
    tune = [
        "finetune_lora.py",
        "--init",
        base,
        "--data",
        sums,
        "--out",
        out,
        "--batch",
        4,
        "--seq-len",
        64,
    ]
    if name == "experts":
        refused(launch(*changed, *tune), "so no file holds its adapter: leave w1 out of --targets")
        tune += ["--targets", "wq", "wo"]
    succeed(*changed, *tune, "--steps", 2, "--save-every", 1)
    succeed(*changed, *tune, "--steps", 3, "--resume", nproc=2)
    succeed(*changed, "generate.py", base, "--adapter", out, "--prompt", "1 and")
    succeed(*changed, "checkpoint.py", "merge", base, out, tmp_path / "merged")
    succeed(*changed, "generate.py", tmp_path / "merged", "--prompt", "1 and")


@pytest.mark.slow
def test_ranks_that_share_sequences_compute_the_same_or_refuse(name, changed, corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    given = dict(steps=3, **FLAGS.get(name, {}))
    succeed(*changed, "train.py", *flags(corpus, one, **given))
    result = launch(*changed, "train.py", *flags(corpus, two, cp=2, dp="fsdp", **given), nproc=2)
    if name == "sliding_window":  # which takes a rank's own tokens for all there are
        refused(result, "--cp computes another loss than one process")
        return
    assert result.code == 0, result.err
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12), key


@pytest.mark.parametrize(
    "name, layer", [("qk_norm", "attention.q_norm"), ("experts", "feed_forward.router")]
)
def test_a_layer_without_a_place_in_the_plan_is_refused(name, layer, corpus, tmp_path):
    changed = changed_copy(tmp_path / "copy", name, exclude="parallel.py")
    result = launch(*changed, "train.py", *flags(corpus, tmp_path / "run"), "--tp", 2, nproc=2)
    refused(result, f"--tp cannot shard layers.0.{layer}.weight: add its layer to PLAN")


def test_what_each_stage_of_a_pipeline_would_repeat_is_refused(corpus, tmp_path):
    """The stream is scaled after the embedding, and so would be the input of every stage."""
    embed = (
        "        device, dtype, E = tokens.device.type, self.compute_dtype, self.config.head_dim\n"
    )
    changed = changed_copy(tmp_path / "copy", edits={embed: f"        x = 8 * x\n{embed}"})
    run = ["train.py", *flags(corpus, tmp_path / "run"), "--pp", 2]
    refused(launch(*changed, *run, nproc=2), "--pp computes another loss than one process")


# Places in model.py.
FEED_FORWARD = "self.feed_forward(self.ffn_norm(x))"
FEATURES = "self.swiglu(self.w1(x), self.w3(x))"
W3 = "nn.Linear(config.dim, config.ffn_dim, bias=False)"
SUM = "return torch.where(targets != IGNORE, losses, 0).sum()"
SHARED_GLOBAL = "KEYS = []\n\n\nclass Attention("
DOUBLED = """class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block("""
LOSS = "return vocabulary.cross_entropy(logits, targets)"


@pytest.mark.parametrize(
    "old, new",
    [
        (FEATURES, f"F.normalize({FEATURES}, dim=-1)"),
        slow("(q, k, v, mask).flat", "(q - q.mean(2, keepdim=True), k, v, mask).flat"),  # heads
        slow(LOSS, f"{LOSS} + logits.logsumexp(-1)"),
    ],
    ids=["features", "heads", "loss"],
)
def test_what_sees_a_shard_for_the_whole_is_refused(old, new, corpus, tmp_path):
    changed = changed_copy(tmp_path / "copy", edits={old: new})
    result = launch(*changed, "train.py", *flags(corpus, tmp_path / "run"), "--tp", 2, nproc=2)
    refused(result, "--tp computes another loss than one process, since model.py was changed")


# Places in model.py, of a change in which odd layers use keys and values of the layer before.
PROJECTIONS = """        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
"""
KEYS = "k = self.rotate(self.wk(x).view(B, T, -1, self.head_dim), cos, sin)"
VALUES = "v = self.wv(x).view(B, T, -1, self.head_dim)"
ATTENTION = "self.attention(self.attention_norm(x), cos, sin, mask, cache)"
LOOP = "            for block in self.layers.values():\n                x = block("
SHARED = {
    PROJECTIONS: f"        if layer % 2 == 0:\n{indent(PROJECTIONS, '    ')}",
    "cache=None):\n        B, T, _": "cache=None, last=None):\n        B, T, _",
    KEYS: f"{KEYS} if self.layer % 2 == 0 else last[0]",
    VALUES: f"{VALUES} if self.layer % 2 == 0 else last[1]",
    "mask).flatten(2))": "mask).flatten(2)), (k, v)",
    "cache=None):\n        x = x": "cache=None, last=None):\n        x = x",
    f"x = x + {ATTENTION}": f"y, last = {ATTENTION[:-1]}, last)\n        x = x + y",
    f"return x + {FEED_FORWARD}": f"return x + {FEED_FORWARD}, last",
    f"{LOOP}x, cos, sin, mask, cache)": f"            last = None\n{LOOP[:-10]}x, last = block("
    "x, cos, sin, mask, cache, last)",
}


@pytest.mark.parametrize(
    "split, message",
    [
        ({"pp": 2, "n_layers": 4}, ""),  # no stage begins between two layers that share
        ({"pp": 2, "n_layers": 6}, "--pp fails where one process does not (TypeError in line "),
        ({"tp": 2}, 'PLAN["layers.*.attention"] lists the inputs of attention'),
    ],
    ids=["pp", "pp between", "tp"],
)
def test_keys_and_values_of_another_layer(split, message, corpus, tmp_path):
    """Training is exact or refused."""
    changed = changed_copy(tmp_path / "copy", edits=SHARED)
    one, two = tmp_path / "one", tmp_path / "two"
    given = dict(steps=2, eval_every=0, n_layers=4, dtype="float64")
    result = launch(*changed, "train.py", *flags(corpus, two, **given | split), nproc=2)
    if message:
        refused(result, message, "since model.py was changed")
        return
    assert result.code == 0, result.err
    succeed(*changed, "train.py", *flags(corpus, one, **given))
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12)


# Adds 0 to the features, and doubles their gradient where a rank has a part of them.
WITH_A_GRADIENT = "(lambda h: h + (h - h.detach()) * (h.shape[-1] < len(self.w1.weight)))"


def test_every_flag_that_splits_is_named_and_so_is_a_gradient(corpus, tmp_path):
    changed = changed_copy(tmp_path / "copy", edits={FEATURES: f"{WITH_A_GRADIENT}({FEATURES})"})
    run = ["train.py", *flags(corpus, tmp_path / "run", microbatch=1, tp=2, pp=2)]
    refused(
        launch(*changed, *run, nproc=4),
        "--tp with --pp computes another gradient of layers.",
        "feed_forward.w3.weight than one process",
        "from wq to wo a rank has some of the heads",
        "each stage calls Llama.forward on its layers",
    )


NO_SUM = "another row without targets changes the loss"


@pytest.mark.parametrize(
    "edits, message",
    [
        ({"self.w1(x)": "self.w1(x).detach()"}, "the gradient of layers.1.feed_forward.w1.weight"),
        ({SUM: SUM.replace(".sum()", ".mean()")}, NO_SUM),
        ({SUM: "return losses.sum()"}, NO_SUM),
        ({"class Block(": DOUBLED, FEATURES: f"Doubled.apply({FEATURES})"}, "is not the slope of"),
    ],
    ids=["detached", "mean", "ignored targets", "backward"],
)
def test_a_gradient_that_is_not_the_slope_is_refused(edits, message, corpus, tmp_path):
    changed = changed_copy(tmp_path / "copy", edits=edits)
    refused(launch(*changed, "train.py", *flags(corpus, tmp_path / "run")), message)


# Places in model.py, of a change in which each head has a learned scale.
SCALE = """class HeadScale(nn.Module):
    def __init__(self, n_heads):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads))

    def forward(self):
        return self.weight


class Attention("""
SCALES = {
    "class Attention(": SCALE,
    "        self.head_dim = config.head_dim\n": "        self.head_dim = config.head_dim\n"
    "        self.scale = HeadScale(config.n_heads)\n",
    KEYS: f"q = q * self.scale()[:, None]\n        {KEYS}",
}
KNOWN = {"(RMSNorm, nn.RMSNorm)": "(RMSNorm, nn.RMSNorm, HeadScale)"}
PLANNED = '    "layers.*.attention.wo": ROWS,'


def test_a_number_for_each_head_has_a_place(corpus, tmp_path):
    run = ["train.py", *flags(corpus, tmp_path / "run", steps=2, optimizer="adamw")]
    unknown = changed_copy(tmp_path / "unknown", edits=SCALES)
    refused(launch(*unknown, *run), "attention.scale.weight has no initial value: give it one in")
    changed = changed_copy(tmp_path / "copy", edits=SCALES | KNOWN)
    refused(
        launch(*changed, *run, "--tp", 2, nproc=2),
        "as OfHeads() of techniques/parallel_layers.py if it is a number",
    )
    file = tmp_path / "copy/parallel.py"
    for style, message in (
        ("NORM", "--tp fails where one process does not (IndexError"),
        ("COLUMNS", "--tp fails where one process does not (NotImplementedError"),
        ("OfHeads()", ""),
    ):
        place = f'{PLANNED}\n    "layers.*.attention.scale": {style},'
        source = (
            (ROOT / "parallel.py").read_text().replace("    NORM,\n", "    NORM,\n    OfHeads,\n")
        )
        file.write_text(source.replace(PLANNED, place))
        result = launch(*changed, *run, "--tp", 2, nproc=2)
        if message:
            refused(result, message)
    assert result.code == 0, result.err
    split = metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    succeed(*changed, *run)
    for ours, theirs in zip(split, metrics(tmp_path / "run"), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12)


def test_a_layer_that_is_no_longer_there_cannot_be_saved(corpus, tmp_path):
    edits = {FEATURES: "F.gelu(self.w1(x))", **{f"        self.w3 = {W3}\n": ""}}
    changed = changed_copy(tmp_path / "copy", edits=edits)
    run = ["train.py", *flags(corpus, tmp_path / "run"), "--checkpointing", "selective"]
    refused(launch(*changed, *run), "FeedForward has no w3, which its saved_products names")


def test_what_recomputation_would_read_of_another_microbatch_is_refused(corpus, tmp_path):
    """Odd layers add the keys of the layer before, from a global."""
    keys = "KEYS.append(k) if self.layer % 2 == 0 else None\n        k = k + KEYS[-1]"
    edits = {f"{VALUES}  #": f"{keys}\n        {VALUES}  #", "class Attention(": SHARED_GLOBAL}
    changed = changed_copy(tmp_path / "copy", edits=edits)
    given = dict(pp=2, microbatch=1, eval_every=0, n_layers=4)
    run = ["train.py", *flags(corpus, tmp_path / "run", **given), "--checkpointing"]
    refused(launch(*changed, *run, "full", nproc=2), "--pp computes another gradient of ")
    succeed(*changed, *run, "none", nproc=2)


def test_other_code_than_trained_a_run_is_told(corpus, sums, tmp_path):
    """Generating, resuming and fine-tuning; the same code, and another loss, are not."""
    no_rope = changed_copy(tmp_path / "copy", edits={f"{KEYS}": KEYS.replace("cos, sin", "1, 0")})
    z_loss = changed_copy(tmp_path / "z-loss", "z_loss")
    run = ["train.py", *flags(corpus, tmp_path / "run", steps=2, save_every=1), "--resume"]
    succeed(*run)
    tune = ["finetune_lora.py", "--init", tmp_path / "run", "--data", sums, "--seq-len", 64]
    tune += ["--batch", 4, "--steps", 1, "--out"]
    for n, (within, is_told) in enumerate((((), False), (z_loss, False), (no_rope, True))):
        for command in (
            ["generate.py", tmp_path / "run", "--prompt", "1 and"],
            [*tune, tmp_path / f"adapter-{n}"],
            [*run, "--steps", 3 + n],  # last: it saves the logits of this code
        ):
            told = f"the code that trained {tmp_path / 'run' / 'step-'}"
            assert (told in succeed(*within, *command).err) == is_told, command


def test_a_layer_that_mixes_tokens_without_a_cache_is_told(corpus, tmp_path):
    shifted = "x = x + F.pad(x, (0, 0, 1, -1)) + self.attention(self.attention_norm(x)"
    edits = {"x = x + self.attention(self.attention_norm(x)": shifted}
    changed = changed_copy(tmp_path / "copy", edits=edits)
    result = succeed(*changed, "train.py", *flags(corpus, tmp_path / "run", steps=1))
    assert "note: generation computes other logits than training" in result.out


@pytest.mark.parametrize("nproc", [1, 2])
def test_dropout_is_for_training(nproc, corpus, tmp_path):
    """As seen after two steps without a learning rate; in a block, and in each stage."""
    dropped = f"F.dropout({FEED_FORWARD}, 0.5, self.training)"
    normed = "F.dropout(self.norm(x if cache is None else x[:, -1:]), 0.5, self.training)"
    edits = {FEED_FORWARD: dropped, "self.norm(x if cache is None else x[:, -1:])": normed}
    for out, changes in (("plain", {}), ("dropout", edits)):
        given = flags(corpus, tmp_path / out, steps=2, lr=0, eval_every=1, pp=nproc)
        within = changed_copy(tmp_path / f"{out}-copy", edits=changes)
        succeed(*within, "train.py", *given, nproc=nproc)
    plain, changed = metrics(tmp_path / "plain"), metrics(tmp_path / "dropout")
    assert [row["val_loss"] for row in plain] == [row["val_loss"] for row in changed]
    assert all(row["loss"] != other["loss"] for row, other in zip(plain, changed))


def test_a_cap_of_the_logits_that_training_lacks_is_told(corpus, tmp_path):
    capped = {"return self.output(x)": "return self.output(x).tanh()"}
    for out, edits in (("plain", {}), ("capped", capped)):
        changed = changed_copy(tmp_path / f"{out}-copy", edits=edits)
        result = succeed(*changed, "train.py", *flags(corpus, tmp_path / out, steps=1))
        told = "validation is not the cross entropy of the logits that generation" in result.out
        assert told == bool(edits)


@pytest.mark.parametrize("float8", ["none", "tensorwise"])
def test_a_layer_that_is_not_called_is_told(corpus, tmp_path, float8):
    """Where its weight is used without it, 8 bits have no effect."""
    edits = {"self.wq(x)": "F.linear(x, self.wq.weight)"}
    for out, changes in (("plain", {}), ("changed", edits)):
        changed = changed_copy(tmp_path / f"{out}-copy", edits=changes)
        given = flags(corpus, tmp_path / out, steps=1, float8=float8, dim=32, ffn_dim=64)
        told = "no effect in attention.wq" in succeed(*changed, "train.py", *given).out
        assert told == bool(changes and float8 != "none")


# ---------------------------------------------------------------------------- what is computed

# Each returns the logits [B, T, V] of the changed model, from another program or a formula.


def unchanged(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    return functional_call(Llama(CONFIG).double(), weights, tokens)


def gelu(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    def forward(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        x = self.w1(x)
        return self.w2(x * (1 + torch.erf(x / math.sqrt(2))) / 2)

    peer = Llama(CONFIG).double()
    for block in peer.layers.values():
        block.feed_forward.forward = partial(forward, block.feed_forward)
    return functional_call(peer, weights, tokens)


def qk_norm(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    norms = {n: w for n, w in weights.items() if "q_norm" in n or "k_norm" in n}
    converted = to_hugging_face(CONFIG, {n: w for n, w in weights.items() if n not in norms})
    for name, weight in norms.items():  # from pairs to halves, like the rows of wq and wk
        name = f"model.{name.replace('attention', 'self_attn')}"
        converted[name] = weight.view(-1, 2).T.flatten()
    return hugging_face("Qwen3", converted, tokens, head_dim=CONFIG.head_dim)


def sliding_window(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    return hugging_face("Mistral", to_hugging_face(CONFIG, weights), tokens, sliding_window=3)


def experts(weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    converted = {n: w for n, w in weights.items() if "feed_forward" not in n}
    converted = to_hugging_face(CONFIG, converted)
    for layer in range(CONFIG.n_layers):  # the matrices of all experts are one tensor there
        ours, theirs = f"layers.{layer}.feed_forward", f"model.layers.{layer}.mlp"
        w1, w2, w3 = (
            torch.stack([weights[f"{ours}.experts.{i}.{name}.weight"] for i in range(4)])
            for name in ("w1", "w2", "w3")
        )
        converted[f"{theirs}.gate.weight"] = weights[f"{ours}.router.weight"]
        converted[f"{theirs}.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
        converted[f"{theirs}.experts.down_proj"] = w2
    options = dict(num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
    return hugging_face("Mixtral", converted, tokens, **options)


def hugging_face(kind: str, weights: dict, tokens: torch.Tensor, **options) -> torch.Tensor:
    import transformers

    config = hugging_face_config(CONFIG, kind, attn_implementation="sdpa", **options)
    peer = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    in_float64 = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    for module in peer.modules():  # theirs computes in float32 whatever the model's dtype
        if type(module).__name__ == f"{kind}RMSNorm":
            module.forward = lambda x, norm=module: F.rms_norm(
                x, norm.weight.shape, norm.weight, norm.variance_epsilon
            )
        if type(module).__name__ == "MixtralTopKRouter":
            module.forward = in_float64(module.forward)
    return functional_call(peer, weights, kwargs={"input_ids": tokens}).logits


def z_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What the change adds to the loss of training."""
    return 1e-4 * (logits.logsumexp(-1) ** 2)[targets != IGNORE].sum()


MODELS = {"experts": experts, "gelu": gelu, "qk_norm": qk_norm, "sliding_window": sliding_window}
LOSSES = {"z_loss": z_loss}


@pytest.mark.slow
def test_it_computes_what_others_compute(name, changed, tmp_path):
    given, results = tmp_path / "given.pt", tmp_path / "results.pt"
    batches = {packed: batch_of(packed) for packed in (False, True)}
    rows = {packed: (b.tokens, b.targets, b.positions) for packed, b in batches.items()}
    torch.save({"config": GROUPED, "batches": rows}, given)
    succeed(*changed, "tests/workers/outputs.py", given, results)
    result = torch.load(results)
    weights = {name: weight.requires_grad_() for name, weight in result["weights"].items()}
    torch.testing.assert_close(result["cached"], result["full"], rtol=1e-12, atol=1e-12)
    for packed, ours in result["batches"].items():
        loss = extra = 0
        for document in (slice(0, 4), slice(4, 13)) if packed else (slice(0, 13),):
            tokens, targets = (t[:, document] for t in rows[packed][:2])
            logits = MODELS.get(name, unchanged)(weights, tokens)
            loss = loss + F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            if name in LOSSES:
                extra = extra + LOSSES[name](logits, targets)
        assert ours["validation"] == pytest.approx(loss.item(), rel=1e-12)
        assert ours["loss"] == pytest.approx((loss + extra).item(), rel=1e-12)
        gradients = torch.autograd.grad(loss + extra, list(weights.values()))
        for (parameter, gradient), expected in zip(ours["gradients"].items(), gradients):
            error = (gradient - expected).norm() / expected.norm()
            assert error < 1e-12, (packed, parameter, error)
