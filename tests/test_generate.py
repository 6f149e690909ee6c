"""generate.py, with a model that has learnt a line by heart."""

import pytest
from conftest import launch, succeed

from checkpoint import load_pretrained
from generate import generate
from text.tokenizer import load_tokenizer

POEM = "El niño soñó: 漢字 y 🙂.\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate")
    (directory / "poem.txt").write_text(POEM * 400)
    tokens = directory / "tokens"
    succeed("data.py", "tokenize", directory / "poem.txt", "--tokenizer", "bytes", "--out", tokens)
    succeed(
        "train.py", "--data", tokens, "--out", directory / "out", "--dim", 64, "--n-layers", 2,
        "--steps", 150, "--seq-len", 64, "--batch", 8, "--eval-every", 0, nproc=2,
    )  # fmt: skip
    return directory / "out"


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_learnt_text_is_printed_once(run, nproc):
    flags = ["--max-new-tokens", len(POEM[6:].encode()), "--temperature", 0, "--seed", 3]
    result = succeed("generate.py", run, "--prompt", POEM[:6], *flags, nproc=nproc)
    assert result.out.count(POEM.strip()) == 1  # characters of several tokens are whole
    assert result.out.count(POEM[:6]) == 1


def test_several_prompts(run):
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
