import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # what runs here is small, and other processes run beside it


def shared(name: str) -> Path:
    """A file of test data that is not part of the project; its tests are skipped without it."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    return path


def hugging_face_config(config, **more):
    """transformers' description of a LlamaConfig."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return transformers.LlamaConfig(
        hidden_size=config.dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        intermediate_size=config.ffn_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_embeddings,
        **more,
    )


class Result:
    def __init__(self, codes: list[int], out: str, err: str):
        self.codes, self.out, self.err = codes, out, err

    @property
    def code(self) -> int:
        """The first exit code that is not 0."""
        return next(filter(None, self.codes), 0)


def start(script: str, *args, nproc: int = 0, torchrun=("--standalone",)) -> subprocess.Popen:
    """Start a script by torchrun on a free port or, with nproc 0, by python alone."""
    command = [sys.executable]
    if nproc:
        command += ["-m", "torch.distributed.run", *torchrun, f"--nproc-per-node={nproc}"]
    return subprocess.Popen(
        [*command, str(ROOT / script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # signals for it do not reach the tests
        env=ENVIRONMENT,
    )


def finish(process: subprocess.Popen, timeout: float = 120) -> Result:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers, which it alone can reach
        out, err = process.communicate(timeout=60)
        pytest.fail(f"{process.args} took more than {timeout} s\n{out}\n{err}")
    return Result([process.returncode], out, err)


server: list[subprocess.Popen] = []  # tests/workers/fork_server.py, once one is needed


def launch(
    script: str,
    *args,
    nproc: int = 0,
    timeout: float = 120,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> Result:
    """Run a script like `start` and `finish`, without the time that torchrun and imports take.

    Calls meanwhile(process ids of all ranks) while it runs."""
    if not server:
        command = [sys.executable, ROOT / "tests/workers/fork_server.py"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server.append(subprocess.Popen(command, start_new_session=True, env=ENVIRONMENT, **pipes))
        atexit.register(_stop, server[0])
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory) / "out", Path(directory) / "err"
        request = dict(script=str(ROOT / script), arguments=[*map(str, args)], nproc=nproc)
        request |= dict(timeout=timeout, out=str(out), err=str(err))
        print(json.dumps(request), file=server[0].stdin, flush=True)
        answer = ranks = _answer()
        if ranks:
            try:
                if meanwhile:
                    meanwhile(ranks)
            except BaseException:
                for rank in ranks:
                    os.kill(rank, signal.SIGKILL)
                raise
            finally:
                answer = _answer()
        out, err = (path.read_text() if path.exists() else "" for path in (out, err))
    if answer is None:
        pytest.fail(f"{request} took more than {timeout} s, or did not start\n{out}\n{err}")
    return Result(answer, out, err)


def _answer() -> list[int] | None:
    line = server[0].stdout.readline()
    if not line:
        server.clear()
        pytest.fail("tests/workers/fork_server.py has ended: its error is above")
    return json.loads(line)


def _stop(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait(10)


def by_torchrun(script: str, *args, nproc: int) -> Result:
    """Run a script as a user does; where torchrun itself is not what is tested, `launch` it."""
    return finish(start(script, *args, nproc=nproc))


def succeed(script: str, *args, run=launch, **options) -> Result:
    """Run a script by `launch` or by_torchrun, and assert that it exits with code 0."""
    result = run(script, *args, **options)
    assert set(result.codes) == {0}, result.err
    return result


def refused(result, *parts: str) -> None:
    """Assert that a run ended with one line that has these parts, and with exit code 2."""
    lines = error_lines(result)
    assert len(lines) == 1, result.err
    assert all(part in lines[0] for part in parts), lines[0]
    assert "Traceback" not in result.err and "[rank" not in result.err
    assert set(result.codes) == {2}  # on every rank


def error_lines(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("error: ")]


def wait_for_lines(path: Path, lines: int) -> None:
    """Wait until a file has at least so many lines."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"{path} has fewer lines than {lines}"
        time.sleep(0.05)


def metrics(out: Path) -> list[dict]:
    """Read the metrics of a run, a dictionary for each step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def slow(*case):
    """Return a case of a test that only -m slow runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A small text whose next line can be learnt from the last."""
    path = tmp_path_factory.mktemp("text") / "counting.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(3000)))
    return path


@pytest.fixture(scope="session")
def shards(text, tmp_path_factory) -> Path:
    """That text as byte tokens."""
    out = tmp_path_factory.mktemp("shards") / "counting"
    succeed("data.py", "tokenize", text, "--tokenizer", "bytes", "--out", out)
    return out
