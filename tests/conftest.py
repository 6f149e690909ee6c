import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
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
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err


def start(script: str, *args, nproc: int = 0, torchrun=("--standalone",)) -> subprocess.Popen:
    """A script of the project, by torchrun on a free port or, with nproc 0, by python alone."""
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
    return Result(process.returncode, out, err)


def launch(script: str, *args, nproc: int = 0, timeout: float = 120) -> Result:
    if nproc:
        return finish(start(script, *args, nproc=nproc), timeout)
    return forked(script, *args, timeout=timeout)


server: list[subprocess.Popen] = []  # once one is needed


def forked(script: str, *args, timeout: float) -> Result:
    """A script of the project by python alone, without the time that its imports take."""
    if not server:
        command = [sys.executable, ROOT / "tests/workers/fork_server.py"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server.append(subprocess.Popen(command, start_new_session=True, env=ENVIRONMENT, **pipes))
        atexit.register(server[0].kill)
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory) / "out", Path(directory) / "err"
        request = [str(ROOT / script), [*map(str, args)], str(out), str(err)]
        print(json.dumps(request), file=server[0].stdin, flush=True)
        if not select.select([server[0].stdout], [], [], timeout)[0]:
            subprocess.run(["pkill", "-P", str(server.pop().pid)])
            pytest.fail(f"{request} took more than {timeout} s\n{out.read_text()}")
        code = int(server[0].stdout.readline())
        return Result(code, out.read_text(), err.read_text())


def succeed(script: str, *args, nproc: int = 0, timeout: float = 120) -> Result:
    result = launch(script, *args, nproc=nproc, timeout=timeout)
    assert result.code == 0, result.err
    return result


def refused(result, *parts: str) -> None:
    """One line that says it, exit code 2, no traceback."""
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.err
    assert all(part in lines[0] for part in parts), lines[0]
    assert "Traceback" not in result.err
    assert result.code == 2


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
