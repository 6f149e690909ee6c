"""A wrong command ends with exit code 2 on every rank, and with one line that says what to type.

A row has the number of ranks, a command, and parts of its error line, with " ... " between them.
A first word in FIRST stands for the flags there. Names in braces are paths: {text}, {corpus} and
{sums} (conftest.py), {base} (a checkpoint), {run} (of train.py), {bare} (Hugging Face's files
without a tokenizer), {killed} (a run before its first save), {foreign} (a token of 999), {other} (a
tokenizer of 300 tokens), {with_w} (a schedule), {here} (an empty directory), {out} (never made).

test_exact.py draws its cases from what no technique refuses. So it holds the rules of which of them
combine, and only some of these rules have a row here.
"""

import shlex

import numpy as np
import pytest
from conftest import launch, refused, succeed

from data import TokenFileWriter
from files.conversion import write_checkpoint
from files.export import save_hf
from files.safetensors import StoredTensor
from model import Llama, LlamaConfig
from text.bpe import train_tokenizer
from text.tokenizer import load_tokenizer

SIZES = "--dim 32 --n-layers 2 --n-heads 4 --n-kv-heads 2 --ffn-dim 48"
SHORT = "--out {out} --steps 5 --batch 8 --warmup 2 --eval-every 0 --save-every 0 --dtype float64"
FIRST = {
    "train": f"train.py {SIZES} {SHORT} --data {{corpus}} --seq-len 24",
    "finetune": f"finetune_lora.py {SHORT} --data {{sums}} --init {{base}} --seq-len 96",
    "step": f"bench.py step {SIZES} --data {{corpus}} --seq-len 24",
    "tokenize": "data.py tokenize {text} --tokenizer bytes --out {out}",
    "lab": "labs/run.py",
    "plan": "bench.py plan",
    "race": "labs/race.py --base=--tokenizer=bytes",
}
REFUSALS = """
# ----------------------------------------------------------------------------------- train.py
1 | train --model gpt5 | no preset 'gpt5' ... llama3.1-8b
1 | train --microbatch 3 | --batch 8 ... --microbatch 3
1 | train --keep -1 | --keep ... from 0
1 | train --clip nan | --clip ... from 0
1 | train --dim 60 | heads of width 15
1 | train --model tiny --seq-len 2500 | --seq-len 2500 ... maximum: --seq-len 2048
1 | train --skip-steps 3 5 | --skip-steps 5 is not before the last step, 5, which saves: leave
1 | train --epochs 2 | --steps and --epochs exclude each other: give one
1 | train --keep-best | need evaluations: give --eval-every
1 | train --exam {text} | need evaluations: give --eval-every
1 | train --dim 99999999999999999 | --dim: expected an integer from 1 to 1e15
1 | train --profile --steps 4 | --profile traces steps 3 to 5
1 | train --epochs 1e39 | --epochs: expected a number from 0 to 1e38
1 | train --data {text}=0.5 {corpus} | give a weight to each source, as in a=0.7 b=0.3
1 | train --time-limit 90 | --time-limit ... hours:minutes, as 23:50, got '90'
1 | train --warmup 6 | --warmup 6 is too long for --steps 5 ... at most --warmup 4
1 | train --warmup 6 --lr-schedule linear | --warmup 6 is too long ... at most --warmup 5
1 | train --betas 0.9 1 | --betas 0.9 1: give two below 1
2 | train --betas 0.9 0.999 --optimizer adamw --moments bfloat16 | --betas ... of at most 0.99
1 | train --micro-batch=3 | --micro-batch=3: did you mean --microbatch?
1 | train --init /no/checkpoint | no checkpoint in '/no/checkpoint'
1 | train --float8 rowwise --ffn-dim 40 --dim 40 --n-heads 1 --n-kv-heads 1 | finds no matrix
1 | train --n-experts 8 | --n-experts is of other models: give --model tiny-experts
1 | train --model small --top-k 2 | --top-k is of other models
1 | train --model tiny-experts --n-experts 4 --ep 2 | --ep 2 must divide 1 (shard x tp)
2 | train --model tiny-experts --n-experts 5 --ep 2 | --ep 2 must divide the 5 experts of the model
2 | train --dp hsdp --shard 3 | --shard 3 ... 2 ranks
2 | train --dp zero1 --tp 2 | --dp zero1 does not combine with --tp ... --dp fsdp
2 | train --dp diloco --every 5 | --dp diloco is retired: use --dp hsdp; labs/rarely ... 86671ca
2 | train --cp 2 --tp 2 | --cp 2 must divide the 1 ranks ... --tp 2
2 | train --cp 2 --seq-len 30 | --seq-len 30 ... the 4 chunks of --cp 2 ... use --seq-len 32
2 | train --pp 2 --n-layers 1 | --pp 2 makes 2 stages ... the model has 1 layers
2 | train --pp 2 --schedule interleaved --n-layers 2 | 4 stages ... by --pp or --stages-per-rank
2 | train --pp 2 --schedule interleaved --n-layers 4 | multiple of 2 microbatches, not 1
2 | train --pp 2 --stages-per-rank 2 --n-layers 4 | 1f1b has one stage on each rank
1 | train --pp 2 --schedule zero-bubble | is retired: use --schedule 1f1b, with which its runs
2 | train --pp 2 --schedule {with_w} | has W, and a run computes a backward whole: leave W out
2 | train --async-tp | --async-tp is for --tp 2 or more
1 | train --offload-activations | keeps what --checkpointing full saves: give that, too
2 | train --schedule gpipe | --schedule and --stages-per-rank are for pipelines: give --pp
1 | train --out {text} | cannot write to --out ... it is a file
1 | train --out {run} | already holds a run ... --resume
1 | train --out {killed} | already holds the record of a run: --resume
1 | train --out {run}/step-00000001 --resume | holds SHA256SUMS, which is of no run
1 | train --out {bare} | .safetensors, which is of no run: give a run's own directory
1 | train --out {run} --resume --ffn-dim 64 | another model ... ffn_dim 48, not 64
1 | train --out {run} --resume --optimizer adamw | another optimizer: give --optimizer muon
1 | train --init {run} --dim 64 | has dim 32, not 64
1 | train --data {corpus} --tokenizer {other} | were not made with tokenizer ... other.model
1 | train --data {corpus} {text} | mixes token files and text
1 | train --data "" | no data at '': give a file
1 | train --out= | --out: expected a path, got ''
1 | train --mode tiny | unrecognized arguments: --mode tiny: did you mean --model?
1 | train --data {foreign} | give --tokenizer
2 | train --data {foreign} --tokenizer bytes --out {here}/run | token 999 ... bytes has only 267
2 | train --lr 1e38 --warmup 0 --dtype float32 --out {here} | step ... not finite ... --skip-steps
# --------------------------------------------------------------------------- finetune_lora.py
2 | finetune --data {text} | counting.txt, line 1: ... is not a JSON object
1 | finetune --dropout 1 | --dropout 1 drops everything: give a number below 1
1 | finetune --alpha 0 | --alpha 0 switches the adapters off: give a number above 0
1 | finetune --all-weights --targets wq | these are for adapters: --targets; leave them out, or
1 | finetune --dora --dropout 0.1 | --dora with --dropout ... leave one out
2 | finetune --base-bits 4 --tp 2 | each of 2 rank(s)
1 | finetune --merge best | --merge best is the checkpoint of --keep-best: give it, too
1 | finetune --rank 33 | --rank 33 ... at most 32
1 | finetune --dp ddp --reshard adapters | --reshard adapters ... fsdp
1 | finetune --dp fsdp --reshard adapters --offload | --offload ... --reshard adapters
1 | finetune --seq-len 8 | longest
1 | finetune --float8 rowwise | --float8 is for training all weights
1 | finetune --optimizer muon | --optimizer muon is for whole matrices ... leave it out
# ------------------------------------------------------------------------------------ data.py
1 | data.py tokenize {text} {text} --out {out} | counting.txt would be read twice
1 | tokenize --out {here} | exists: remove it
1 | data.py train-tokenizer {text} --out {text} | exists: remove it
1 | data.py train-tokenizer {sums} --text-field no --skip-bad --out {out} | there is no text
1 | report.py {run} --out {text} | counting.txt exists, and is no page of report.py
1 | tokenize --val-fraction 1 | no text, or all of it is held out: give more ... --val-fraction
# ------------------------------------------------------------------ generate.py, checkpoint.py
1 | generate.py {base} --tokenizer {other} | trained with another tokenizer than ... other.model
1 | generate.py {base} --top-p 2 | --top-p 2 is no probability: give 1 at most
1 | generate.py {base} --prompt 🙂🙂🙂🙂🙂🙂🙂🙂🙂🙂🙂🙂🙂🙂 | --max-new-tokens 200 are more
2 | generate.py {base} --chat | a conversation needs one process: run python generate.py
1 | generate.py {bare} --prompt a | has no tokenizer.model: give its --tokenizer
1 | checkpoint.py export {base} {here} --format hf | exists
1 | checkpoint.py export {bare} {out} --format gguf | has no tokenizer: import it with --tokenizer
1 | checkpoint.py import {bare} {out} --tokenizer {other} | has 300 tokens ... 267
# -------------------------------------------------------------------------------- evaluate.py
1 | evaluate.py {base} --exam {sums} --json {sums} | exists, and has no answers
1 | evaluate.py {base} --data {text} --seq-len 257 | exceeds the model's maximum: --seq-len 256
1 | evaluate.py {base} --data {text} --json {out} | the answers of an exam: give --exam, too
3 | evaluate.py {base} --data {text} --tp 3 | --tp must divide 2
1 | train --exam {sums} --eval-every 1 --tokenizer bytes | line 1: "question" is None
# ----------------------------------------------------------------------------------- bench.py
1 | step --shard 2 | --shard 2 is for --dp hsdp
1 | bench.py compare "ddp --dp diloco" | --dp diloco is retired
1 | bench.py step --lora=rewards | required: --init, --reward
1 | bench.py step --lora distill --init {out} --teacher {out} --top-k 5 | no checkpoint in
2 | step --batch 3 | --batch 3 is no multiple of the 2 ranks that share it
1 | bench.py compare "ddp --dp auto" | name a strategy, as ddp
1 | bench.py compare "ddp --schedule gpipe" | are for pipelines: give --pp
1 | bench.py compare ddp quick | no contestant quick: choose from one, bare ... or '--tp 2'
1 | bench.py compare "fsdp --reshard adapters" | --reshard adapters is for --lora
1 | bench.py compare one bare --model tiny-experts | bare leaves mixtures out
1 | bench.py generate --model tiny --seq-len 8 2040 | are more than the 2048 tokens
1 | bench.py limit --rank 4 | --rank, --dora and --base-bits are for adapters: give --lora, too
# ------------------------------------------------------------------------------ bench.py plan
1 | plan --batch 12 --tp 1 --pp 1 | --batch 12 is no multiple of the 8 ranks ... --batch 16
1 | plan --gpus 12 | is no multiple of 8, which a node has: give --gpus 16 for 2 full nodes
1 | plan --gpus 4x | --gpus: expected an integer from 1
1 | plan --gpus x4 | --gpus: expected an integer from 1
1 | docs/side_by_side.py nope | no preset 'nope': choose one of tiny
1 | plan --gpus 1 --tp 1 | nothing fits ... GB of 72: give more --gpus
1 | plan --dtype float32 | speed in bfloat16 ... give that of float32 as --gpu in numbers
# -------------------------------------------------------------------------------------- labs/
1 | lab check none | no lab 'none'
1 | lab check mean --ranks 0 | --ranks 0: mean is checked on 2
1 | lab predict bytes --student ada | --student is for --class KEY
1 | lab release {here} | exists: name a new directory
1 | lab grade {here} --csv /no/such/a.csv | /no/such/a.csv cannot be written
1 | lab new mean | there is a folder labs/mean
1 | race '--flags=--lr 1 --ini x' | an entry has no --init of its own: give it in --base
"""
ROWS = [row.split(" | ") for row in REFUSALS.splitlines() if row and row[0] != "#"]


@pytest.fixture(scope="module")
def places(text, corpus, sums, tmp_path_factory) -> dict[str, object]:
    """Return the paths that commands may name; {base} is in float32, with the byte tokenizer."""
    config = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, max_seq_len=256, tie_embeddings=True)
    model, base = Llama(config), tmp_path_factory.mktemp("base") / "base"
    stored = {name: StoredTensor.of(p.detach()) for name, p in model.named_parameters()}
    write_checkpoint(base, config, stored, load_tokenizer("bytes"))
    bare, foreign = (tmp_path_factory.mktemp(name) for name in ("bare", "foreign"))
    save_hf(bare, config, stored)
    writer = TokenFileWriter(foreign, "train", 1000)
    writer.write(np.where(np.arange(1000) == 500, 999, 65))  # one rank reads it within 5 steps
    writer.close()
    killed = base.with_name("killed")
    with_w = base.with_name("schedule.txt")
    places = dict(
        text=text, corpus=corpus, sums=sums, base=base, bare=bare, foreign=foreign, killed=killed,
        with_w=with_w, run=base.with_name("run"), other=foreign.with_name("other.model")
    )  # fmt: skip
    with_w.write_text("F0 B0 W0\nF0 B0 W0\n")
    train_tokenizer([str(text)], 300, places["other"])
    killed.mkdir()
    (killed / "metrics.jsonl").write_text('{"step": 1}\n')
    succeed(*f"{FIRST['train']} --steps 1 --warmup 0".format(**places, out=places["run"]).split())
    return places


@pytest.mark.parametrize("ranks, command, line", ROWS, ids=[command for _, command, _ in ROWS])
def test_a_wrong_command_is_refused_in_one_line(ranks, command, line, places, tmp_path):
    first, *rest = command.split(" ", 1)
    places = places | dict(here=tmp_path, out=tmp_path / "out")
    words = " ".join([FIRST.get(first, first), *rest]).format(**places)
    nproc = 0 if ranks == "1" else int(ranks)
    parts = (part.replace("{out}", str(places["out"])) for part in line.split(" ... "))
    refused(launch(*shlex.split(words), nproc=nproc), *parts)
    assert not places["out"].exists()
