"""generate.py on a model that has learnt a few lines by heart."""

import pytest
from conftest import launch, succeed

from checkpoint import load_pretrained
from data import load_tokenizer
from model import generate

POEM = "El niño soñó: 漢字 y 🙂.\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("generate")
    (place / "poem.txt").write_text(POEM * 400)
    tokens = place / "tokens"
    succeed("data.py", "tokenize", place / "poem.txt", "--tokenizer", "bytes", "--out", tokens)
    succeed(
        "train.py", "--data", tokens, "--out", place / "out", "--dim", 64, "--n-layers", 2,
        "--steps", 150, "--seq-len", 64, "--batch", 8, "--eval-every", 0, nproc=2,
    )  # fmt: skip
    return place / "out"


def test_text_comes_out_as_it_was_learnt(run):
    prompt = POEM[:6]
    flags = ["--max-new-tokens", 60, "--temperature", 0, "--seed", 3]
    result = succeed("generate.py", run, "--prompt", prompt, *flags)
    assert POEM.strip() in result.out  # characters of several tokens are whole


def test_prompts_side_by_side(run):
    model, tokenizer = load_pretrained(run), load_tokenizer("bytes")
    prompts = ["El", "soñó: 漢"]
    expected = generate(model, [tokenizer.encode(p, bos=True) for p in prompts], 30, temperature=0)
    flags = [text for prompt in prompts for text in ("--prompt", prompt)]
    result = succeed("generate.py", run, *flags, "--max-new-tokens", 30, "--temperature", 0)
    for prompt, tokens in zip(prompts, expected):
        assert f"--- {prompt}{tokenizer.decode(tokens)}" in result.out


def test_seeds_repeat(run):
    flags = ["--prompt", "El", "--temperature", 3, "--max-new-tokens", 20, "--top-k", 50]
    a, b, c = (succeed("generate.py", run, *flags, "--seed", seed).out for seed in (1, 1, 2))
    assert a == b != c


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/no/such/run"], "no checkpoint in '/no/such/run'"),
        (["RUN", "--max-new-tokens", 3000], "more than the 2048 tokens"),
        (["RUN", "--temperature=-1"], "--temperature: expected a number of at least 0"),
        (["RUN", "--tokenizer", "python-300"], "trained with another tokenizer than python-300"),
        (["RUN", "--tokenizer", "nonsense"], "no tokenizer 'nonsense'"),
    ],
)
def test_wrong_input(run, arguments, message):
    arguments = [run if text == "RUN" else text for text in arguments]
    result = launch("generate.py", *arguments)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err
