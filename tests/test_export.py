"""checkpoint.py's export, after model.py has been changed as a class may change it."""

import pytest
import torch
import transformers
from conftest import ROOT, hugging_face_config, launch, refused, succeed

from model import Llama
from plumbing import fingerprint, formats
from plumbing.processes import UserError

# The lines of model.py that are changed, and places for more lines.
SWIGLU = "SwiGLU.apply(self.w1(x), self.w3(x))"
W3 = "        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)\n"
FIELD = "    tie_embeddings: bool = False"
TINY = "vocab_size=2048, tie_embeddings=True"
ATTENTION = "        self.layer = layer\n"
MASK = "        if mask is not None:  # with a mask"
FEED_FORWARD = "self.feed_forward = FeedForward(config)"
LOSS = "            loss -= torch.where"


def window(default: int) -> dict[str, str]:
    return {
        FIELD: f"    window: int = {default}\n{FIELD}",
        TINY: f"window=64, {TINY}",
        ATTENTION: f"{ATTENTION}        self.window = config.window\n",
        MASK: f"""\
        if self.window:
            in_window = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - self.window)
            mask = in_window if mask is None else mask & in_window
{MASK}""",
    }


GELU = {W3: "", SWIGLU: "F.gelu(self.w1(x))"}
GEGLU = {SWIGLU: "F.gelu(self.w1(x)) * self.w3(x)"}
QK_NORM = {
    FIELD: f"    qk_norm: bool = False\n{FIELD}",
    TINY: f"qk_norm=True, {TINY}",
    ATTENTION: f"""{ATTENTION}\
        norm = nn.RMSNorm if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(config.head_dim), norm(config.head_dim)
""",
    MASK: f"        q, k = self.q_norm(q), self.k_norm(k)\n{MASK}",
}
EXPERTS = {
    FIELD: f"    n_experts: int = 0\n{FIELD}",
    TINY: f"n_experts=3, {TINY}",
    FEED_FORWARD: "self.feed_forward = (Experts if config.n_experts else FeedForward)(config)",
    "class Block(nn.Module):": """\
class Experts(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.router = nn.Linear(config.dim, config.n_experts, bias=False)
        self.experts = nn.ModuleList([FeedForward(config) for _ in range(config.n_experts)])

    def forward(self, x):
        p = self.router(x).softmax(-1)
        return sum(p[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):""",
}
OFF = {FIELD: f"    window: int = 0\n{FIELD}"}
Z_LOSS = {LOSS: f"            loss += 1e-4 * logits.logsumexp(-1).square().sum()\n{LOSS}"}


def exports(changes: dict[str, str], data, directory) -> list:
    """Train a changed model for one step, and return how its exports to both formats ended."""
    source = (ROOT / "model.py").read_text()
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (directory / "model.py").write_text(source)
    changed = ("tests/workers/changed_model.py", directory / "model.py")
    run = directory / "run"
    succeed(*changed, "train.py", "--data", data, "--out", run, "--steps", 1, "--batch", 2,
            "--seq-len", 100, "--eval-every", 0)  # fmt: skip
    return [
        launch(*changed, "checkpoint.py", "export", run, directory / format, "--format", format)
        for format in ("hf", "meta")
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        (GELU, "not a published Llama's: it lacks 4: layers.0.feed_forward.w3.weight,"),
        (GEGLU, "model.py has been changed and no longer computes"),
        (QK_NORM, "it has unknown 8: layers.0.attention.k_norm.weight,"),
        (window(0), "read back with window 0, not 64"),
        (window(64), "model.py has been changed and no longer computes"),
        (EXPERTS, "it has unknown 40: layers.0.feed_forward.experts.0.w1.weight,"),
    ],
    ids="gelu geglu qk-norm window default-window experts".split(),
)
def test_a_model_that_the_format_cannot_hold_is_refused(changes, message, shards, tmp_path):
    for result in exports(changes, shards, tmp_path):
        refused(result, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.py", "run"]


def test_another_loss_and_a_field_that_is_off_do_not_matter(shards, tmp_path):
    results = exports(Z_LOSS | OFF, shards, tmp_path)
    assert [result.code for result in results] == [0, 0], results[0].err


def test_a_parameter_that_hugging_face_has_no_name_for():
    with pytest.raises(UserError, match=r"no parameter like layers\.0\.attention\.q_norm\.weight"):
        formats.hf_name("layers.0.attention.q_norm.weight")


@torch.no_grad()
def test_the_fingerprint_is_that_of_transformers():
    reference = transformers.LlamaForCausalLM(hugging_face_config(fingerprint.CONFIG)).double()
    reference.load_state_dict({
        formats.hf_name(name): formats.to_hf_rows(
            name, fingerprint.CONFIG, fingerprint.fixed_weight(name, p)
        )
        for name, p in Llama(fingerprint.CONFIG).named_parameters()
    })  # fmt: skip
    logits = reference.eval()(fingerprint.TOKENS).logits[0, -1, :4]
    torch.testing.assert_close(logits.tolist(), [*fingerprint.LOGITS], rtol=0, atol=1e-5)
    fingerprint.check_computes_llama()
