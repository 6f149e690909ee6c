"""Decoding against the whole forward and frozen tokens, in float64; a graph is emulated."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import ROOT, like, succeed
from test_model import CONFIGS, SMALL, build, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import ParallelConfig
from generate import Memory, compile_blocks
from model import Llama, LlamaConfig
from parallel import weights_gathered
from perf.generation import bytes_of_step
from plumbing.messages import UserError
from runs.answers import Trace
from techniques import cuda_graph, decoding
from techniques.cuda_graph import Repeated, Waits
from techniques.decoding import generate, sample
from techniques.kv_cache import KVCache


@pytest.fixture
def model() -> Llama:
    return build(SMALL)


@torch.no_grad()
def likeliest(model: Llama, prompt: list[int], new: list[int]) -> list[int]:
    """Return the likeliest token in place of each of `new`, without a cache."""
    logits = model(torch.tensor([prompt + new]))[0]
    return logits.argmax(-1).tolist()[len(prompt) - 1 : -1]


@pytest.mark.parametrize("at_a_time", [2048, 5])
def test_cached_generation_equals_the_uncached_forward(model, at_a_time, monkeypatch):
    monkeypatch.setattr("techniques.decoding.AT_A_TIME", at_a_time)
    prompts = [tokens_of(SMALL, n, seed=n).tolist() for n in (1, 13, 6)]
    answers = generate(model, prompts, 25, temperature=0)
    for prompt, new in zip(prompts, answers):
        assert new == likeliest(model, prompt, new)


def test_generation_stops_row_by_row(model):
    prompts = [tokens_of(SMALL, 4, seed=n).tolist() for n in range(6)]
    free = generate(model, prompts, 30, temperature=0)
    stop = (free[0][3], free[2][8])
    answers = generate(model, prompts, 30, temperature=0, stop=stop)
    for whole, stopped in zip(free, answers):
        expected = []
        for token in whole:
            expected.append(token)
            if token in stop:
                break
        assert stopped == expected


PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [1, 2, 3], [11]]
ENDS = 5, 6, 7, 8, 9  # tokens at which answers to these stop at different times
FROZEN = json.loads((ROOT / "tests/frozen_tokens.json").read_text())
SAMPLED = {
    "greedy": dict(temperature=0.0),
    "top_k": dict(temperature=0.7, top_k=9),
    "top_p": dict(top_p=0.8, seed=3),
}


@pytest.mark.parametrize("name", FROZEN)
def test_tokens_are_those_of_before(name):
    """What 86671ca drew: two prompts are equal, and rows end at different times."""
    family, way = name.split()
    sizes = LlamaConfig(32, 2, 4, 4 if family == "mixtral" else 2, 48, vocab_size=101)
    config = {
        "gqa": replace(sizes, rope_scaling=8.0),
        "qwen3": like(sizes, "qwen3", head_dim=16),
        "mixtral": like(sizes, "mixtral", n_experts=4),
    }[family]
    model = config.build().double()
    model.init_weights(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1.3)
    assert generate(model, PROMPTS, 24, stop=(7,), **SAMPLED[way]) == FROZEN[name]


def test_each_prompt_is_read_once_and_finished_rows_are_computed_no_more(model):
    shapes = []
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3]]
    free = generate(model, prompts, 6, temperature=0)
    stop = free[1][2]
    model.tok_embeddings.register_forward_pre_hook(lambda m, x: shapes.append((*x[0].shape,)))
    answers = generate(model, prompts, 6, temperature=0, stop=(stop,))
    lengths = [*map(len, answers)]
    assert answers[1] == free[1][: lengths[1]]
    assert lengths[1] < lengths[0]
    running = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert shapes == [(2, 3), *((rows, 1) for rows in running)]


def test_without_an_order_a_draw_is_by_the_share_of_each_token():
    """No logits are sorted: the token is the first at which the sum of probabilities exceeds the
    number, in the order of the vocabulary."""
    logits = torch.randn(64, 31, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sums = (logits.float() / 0.7).softmax(-1).double().cumsum(-1)
    expected = (sums < uniform[:, None] * sums[:, -1:]).sum(-1)
    assert sample(logits, 0.7, 0, 1.0, uniform).equal(expected)


def test_sampling_follows_temperature_top_k_and_top_p():
    p = torch.tensor([0.1, 0.5, 0.15, 0.25])
    squared = p.pow(2) / p.pow(2).sum()
    top2 = torch.tensor([0, 2 / 3, 0, 1 / 3])
    second = torch.tensor([0.0, 1.0, 0.0, 0.0])
    logits = p.log().expand(4000, -1)
    for temperature, top_k, top_p, expected in (
        (1.0, 0, 1.0, p),
        (0.5, 0, 1.0, squared),
        (1.0, 2, 1.0, top2),
        (1.0, 0, 0.6, top2),
        (1.0, 0, 1e-9, second),
        (0.0, 0, 1.0, second),
    ):
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(4000, generator=generator)
        picked = sample(logits, temperature, top_k, top_p, uniform)
        found = picked.bincount(minlength=4) / 4000
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


# -------------------------------------------------------------------------------- cache and graph


@torch.no_grad()
def test_a_cache_is_as_long_as_it_says(model):
    tokens = tokens_of(SMALL, 1, 9)
    positions = torch.arange(9)[None]
    cache = KVCache(8)
    model(tokens[:, :8], positions=positions[:, :8], cache=cache)
    with pytest.raises(ValueError, match=r"8 \+ 1 tokens are more than a cache of 8 holds"):
        model(tokens[:, 8:], positions=positions[:, 8:], cache=cache)


class Recording(TorchDispatchMode):
    """What a CUDA graph does, on a CPU. Within the context operators are recorded, and afterwards
    all is as it was. A replay runs them on the same memory, with the host's numbers of then."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.overwritten = []
        self.replays = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert function.overloadpacket.__name__ != "_local_scalar_dense", "the host waits"
        if function._schema.is_mutable:
            self.overwritten += [(args[0], args[0].clone())]
        out = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, out))
        return out

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, value in reversed(self.overwritten):
            tensor.copy_(value)

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, out in self.calls:
            if function.is_view:
                continue
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again)):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


@pytest.fixture
def recordings(monkeypatch) -> list[Recording]:
    """Each recording of a step, on this CPU, instead of CUDA graphs."""
    made = []

    def record(step):
        made.append(Recording())
        with made[-1]:
            step()
        return made[-1].replay

    repeated = lambda rows: Repeated(rows.step, rows.remaining.device)  # noqa: E731
    monkeypatch.setattr(decoding.Continuation, "repeated_step", repeated)
    monkeypatch.setattr(cuda_graph, "record", record)
    return made


GRAPH_MODELS = "gqa", "scaled rope", "qwen3", "olmo3", "deepseek_v3"


@pytest.mark.parametrize("name", GRAPH_MODELS)
def test_a_repeated_step_draws_the_same_tokens(name, recordings, monkeypatch):
    """Rows that leave give a step other shapes: it is recorded anew."""
    model = build(CONFIGS[name])
    options = dict(max_new_tokens=24, temperature=20.0)
    with monkeypatch.context() as without:
        without.setattr(decoding.Continuation, "repeated_step", lambda rows: rows.step)
        free = generate(model, PROMPTS, **options)
        stop = (free[1][9],)
        expected = generate(model, PROMPTS, stop=stop, **options)
    assert generate(model, PROMPTS, stop=stop, **options) == expected
    assert len({*map(len, expected)}) > 1
    assert len(recordings) > 1 and sum(recording.replays for recording in recordings) > 5


def defined_with(file: str, old: str, new: str) -> dict:
    """Return what a file of techniques/ defines, after a replacement of what it has once."""
    source = (ROOT / f"techniques/{file}.py").read_text()
    assert source.count(old) == 1
    defined = {"__name__": file}
    exec(compile(source.replace(old, new), file, "exec"), defined)
    return defined


@pytest.fixture(scope="module")
def drawn():
    """A model, and tokens that it draws."""
    model = build(SMALL)
    return model, generate(model, PROMPTS, 24)


@pytest.mark.parametrize("old, new", [
    ("self.positions += 1", "self.positions = self.positions + 1"),
    ("self.count += 1", "self.count = self.count + 1"),
    ("self.newest.copy_(tokens[:, None])", "self.newest = tokens[:, None]"),
])  # fmt: skip
def test_what_is_not_written_in_place_is_not_repeated(old, new, drawn, recordings):
    """The emulated graph finds what a GPU's would get wrong."""
    model, expected = drawn
    changed = defined_with("decoding", old, new)
    assert changed["generate"](model, PROMPTS, 24) == expected
    changed["Continuation"].repeated_step = decoding.Continuation.repeated_step
    assert changed["generate"](model, PROMPTS, 24) != expected


@pytest.fixture(scope="module")
def greedy():
    """A model, a token at which two of four prompts end early, and answers, which are those of the
    whole forward."""
    model = build(SMALL)
    free = generate(model, PROMPTS, 24, temperature=0)
    stop = (free[1][4],)
    answers = generate(model, PROMPTS, 24, temperature=0, stop=stop)
    for prompt, new_tokens in zip(PROMPTS, answers):
        assert new_tokens == likeliest(model, prompt, new_tokens)
    return model, stop, answers


@pytest.mark.parametrize("file, old, new", [
    ("kv_cache", "self.slots = self.next_slot +", "self.slots = self.next_slot // 2 * 2 +"),
    ("kv_cache", "_mask(positions, self.slots,", "_mask(positions, self.slots - 1,"),
    ("kv_cache", "layer.v = layer.v[rows]", "layer.v = layer.v[rows.flip(0)]"),
    ("decoding", "remaining[kept]", "remaining[: len(kept)]"),
    ("decoding", "newest[kept]", "newest[: len(kept)]"),
    ("decoding", "self.positions[kept]", "self.positions[: len(kept)]"),
    ("decoding", "self.draw(logits[prompt_of])", "self.draw(logits[prompt_of.flip(0)])"),
])  # fmt: skip
def test_faults_of_the_cache_and_of_rows_that_leave_are_found(file, old, new, greedy, monkeypatch):
    model, stop, answers = greedy
    changed = defined_with(file, old, new)
    if file == "kv_cache":
        monkeypatch.setattr(decoding, "KVCache", changed["KVCache"])
        generate_with_fault = generate
    else:
        generate_with_fault = changed["generate"]
    found = generate_with_fault(model, PROMPTS, 24, temperature=0, stop=stop)
    assert found != answers


def test_a_step_that_waits_for_the_host_is_not_recorded():
    x = torch.arange(4.0)
    waiting = {
        "item": lambda: x.sum().item(),
        "boolean": lambda: x[x > 1],
        "nonzero": lambda: x.nonzero(),
        "booleans that are set": lambda: x.clone().index_put_((x > 1,), x[2:]),
        "unique": lambda: x.unique(),
        "repeats": lambda: x.repeat_interleave(x.long()),
        "another device": lambda: x.to("meta"),
        "condition": lambda: bool(x.any()),
    }
    for name, step in waiting.items():
        with Waits(x.device) as waits:
            step()
        assert waits.any, name
    with Waits(x.device) as waits:
        x[torch.tensor([1, 2])].cumsum(0).clone()
        x[x > 1] = 0
    assert not waits.any


def test_a_step_that_waits_runs_operator_by_operator(model, recordings):
    expected = generate(model, PROMPTS, 6)
    assert recordings
    recordings.clear()
    model.norm.register_forward_hook(lambda module, given, out: out.sum().item() and None)
    assert generate(model, PROMPTS, 6) == expected
    assert not recordings


@pytest.mark.parametrize("name", ["gqa", "gemma3"])
def test_one_compiled_graph_serves_all_blocks(name, monkeypatch):
    """Layers with a window and without are two kinds. Finished rows stay in the batch."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    model = build(CONFIGS[name])
    options = dict(max_new_tokens=12, temperature=0, stop=ENDS)
    expected = generate(model, PROMPTS, **options)
    compile_blocks(model)
    counters.clear()
    assert generate(model, PROMPTS, compiled=True, **options) == expected
    assert counters["stats"]["unique_graphs"] == (2 if name == "gemma3" else 1)


def test_the_host_looks_at_several_tokens_of_a_gpu(model, monkeypatch):
    """What a row has drawn after its end is dropped."""
    options = dict(max_new_tokens=21, top_p=0.9, stop=ENDS)
    expected = generate(model, PROMPTS, **options)
    assert len({*map(len, expected)}) > 1
    traces = [Trace(model, 21, len(PROMPTS)) for _ in range(2)]
    generate(model, PROMPTS, trace=traces[0], **options)
    monkeypatch.setattr(decoding, "LOOK_AFTER", {})
    assert generate(model, PROMPTS, trace=traces[1], **options) == expected
    one, several = (trace.log_p for trace in traces)
    for row, answer in enumerate(expected):
        length = len(answer)
        torch.testing.assert_close(one[:length, row], several[:length, row], rtol=0, atol=1e-12)


def test_log_p_is_that_of_the_whole_forward(model):
    trace = Trace(model, 12, len(PROMPTS))
    answers = generate(model, PROMPTS, 12, top_p=0.9, stop=ENDS, trace=trace)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers)):
        logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(trace.log_p[: len(answer), row], expected, rtol=0, atol=1e-12)


def test_logits_that_are_not_finite_are_refused(model):
    model.output.weight.data[3] = float("nan")
    with pytest.raises(UserError, match="the model gives no finite logits"):
        generate(model, PROMPTS, 3)


class Casts(TorchDispatchMode):
    """Counts the casts of matrices."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "_to_copy" and args[0].numel() >= 64 * 32:
            self.number += 1
        return function(*args, **(kwargs or {}))


def test_autocast_casts_each_weight_once():
    model = build(SMALL).float()
    model.compute_dtype = torch.bfloat16
    traces = [Trace(model, 8, len(PROMPTS)) for _ in range(2)]
    with Casts() as for_each_token:
        expected = generate(model, PROMPTS, 8, trace=traces[0])
    parallel = ParallelConfig(dtype=torch.bfloat16)
    with weights_gathered(model, parallel), Casts() as once:
        assert generate(model, PROMPTS, 8, trace=traces[1]) == expected
    assert torch.equal(traces[0].log_p, traces[1].log_p)
    matrices = 7 * SMALL.n_layers + 1
    assert once.number == matrices
    assert for_each_token.number == 8 * matrices


# ------------------------------------------------------------------------------ a conversation


def test_a_conversation_is_read_once(model):
    """Each turn begins with what was said before, or with less, if that was changed."""
    memory = Memory()
    options = dict(max_new_tokens=9, temperature=0)
    lengths = []
    model.tok_embeddings.register_forward_pre_hook(lambda m, x: lengths.append(x[0].shape[1]))
    prompt = [1, 2, 3]
    for changed, read in ((0, 3), (0, 5), (6, 5), (0, 6)):
        del lengths[:]
        answer = list(memory.stream(model, prompt, **options))
        assert lengths[0] == read and {*lengths[1:]} == {1}
        assert answer == likeliest(model, prompt, answer)
        prompt = prompt + answer + [20, 21, 22, 23]
        prompt[len(prompt) - changed :] = [30] * changed
    assert memory.tokens == prompt[:-4]
    assert memory.cache.size == 100  # 12, 25 and 50 before: 12, 25, 38 and 51 tokens


@pytest.mark.parametrize("stopped", range(1, 5))
def test_a_conversation_goes_on_after_an_interrupted_answer(model, stopped):
    """Ctrl-C comes while layer 2 computes a token of the prompt, or one of the answer."""
    memory = Memory()
    calls = []

    def interrupt(module, given):
        calls.append(given)
        if len(calls) == stopped:
            raise KeyboardInterrupt

    hook = model.layers["1"].register_forward_pre_hook(interrupt)
    said = []
    with pytest.raises(KeyboardInterrupt):
        for token in memory.stream(model, [1, 2, 3, 4], max_new_tokens=9, temperature=0):
            said.append(token)
    hook.remove()
    for prompt in ([1, 2, 3, 4, *said, 9, 8], [1, 2, 3, 4, *said[:1], 7]):
        answer = list(memory.stream(model, prompt, max_new_tokens=6, temperature=0))
        assert answer == likeliest(model, prompt, answer)


# ------------------------------------------------------------------------------------- bench.py


def test_bench_generate_shows_contestants_beside_the_limit(tmp_path):
    file = tmp_path / "out.json"
    sizes = "--model tiny --seq-len 5 9 --batch 2 --max-new-tokens 3 --repeats 1".split()
    printed = succeed("bench.py", "generate", *sizes, "--json", file).out
    results = json.loads(file.read_text())
    names = ["ours", "transformers", "static"]
    assert [result["contestant"] for result in results["results"]] == 2 * names
    assert [result["context"] for result in results["results"]] == [5, 5, 5, 9, 9, 9]
    assert all(result["writes_what_the_first_does"] for result in results["results"])
    assert "| 2 x 9 | static |" in printed and "operators that are no views" in printed


def test_the_limit_is_the_bytes_that_a_step_reads():
    config = replace(CONFIGS["tied"], head_dim=24)
    model = Llama(config)
    norms_and_matrices = sum(p.numel() for p in model.parameters())
    of_token = 2 * config.n_layers * config.kv_dim
    assert bytes_of_step(model, 3, 50) == 4 * (norms_and_matrices + 3 * 50 * of_token)
    untied = Llama(replace(config, tie_embeddings=False))
    assert bytes_of_step(untied, 3, 50) == bytes_of_step(model, 3, 50)
    experts = CONFIGS["mixtral"].build()
    unused = 3 / 5 * sum(e.numel() for e in experts.parameters() if e.ndim == 3)
    one_row = bytes_of_step(experts, 1, 0)
    assert one_row == pytest.approx(bytes_of_step(experts, 3, 0) - 4 * unused)
