"""Prompts that a model answers, and its answers as rows to train on: rewards.py, distill.py."""

import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data import batch_of
from model import IGNORE, Llama
from parallel import World, used_techniques, weights_gathered
from plumbing.devices import widest_float
from plumbing.messages import UserError
from runs.task import Task
from techniques.decoding import generate
from text.batch import Batch
from text.conversations import files_of
from text.corpora import Reading, check_string, document_name, read_records, split_of
from text.order import window_of
from text.packing import Encoded, Rows
from text.targets import encode_prompt
from text.tokenizer import Tokenizer

EXPECTED = '{"prompt": "..."}'  # a line of the data


class Prompts:
    """Prompts in place of a data set of rows: there is a row for each answer, once it is drawn."""

    document_mask = False

    def __init__(self, prompts: list, group: int = 1):
        """`prompts` are (ids, record) each, `group` is the number of answers to a prompt."""
        self.prompts = prompts
        self.sources = [(len(prompts) * group, 1)]

    def __len__(self) -> int:
        """Return the number of answers to all prompts."""
        return self.sources[0][0]

    def checksum(self) -> int:
        return zlib.crc32(repr(self.prompts).encode())  # with the fields that a reward is given


def open_prompts(run, tokenizer: Tokenizer, reading: Reading) -> tuple[Prompts, Prompts, list, str]:
    """Return what open_samples (text/chat.py) does: prompts to train on, which stand for a group of
    answers each, prompts to evaluate on, no examples, and a line of counts. If a hash holds out
    none of a few prompts, the evaluation is on those of training."""
    read = partial(read_prompts, run, tokenizer, reading)
    train, val = read(run.data)
    if run.val_data:
        train, val = train + val, [*chain(*read(run.val_data))]
    for data, prompts in ((run.data, train), (run.val_data, val)):
        if data and not prompts:
            raise UserError(
                f"{' '.join(data)} has too few prompts: give more lines like {EXPECTED}"
            )
    summary = f"{len(train):,} prompts; {len(val) or 'the same'} to evaluate on"
    return Prompts(train, run.group), Prompts(val or train), [], summary


def read_prompts(run, tokenizer: Tokenizer, reading: Reading, data: list[str]) -> tuple[list, list]:
    """Return the prompts to train on, and those that a hash holds out, each as (ids, record)."""
    splits = {"train": [], "val": []}
    for file in files_of(data, EXPECTED):
        for number, where, record in read_records(file, EXPECTED, reading):
            with reading.one(where):
                text = check_string(record.get("prompt"), f'{where}: "prompt" is')
                for name in ("answer", "answers", "prompts") & record.keys():
                    problem = f'{where}: "{name}" is what this model writes, or a list of that'
                    raise UserError(f"{problem}: rename the field")
                ids = tokenizer.encode(text, bos=True)
                if run.chat:
                    ids = encode_prompt([{"role": "user", "content": text}], tokenizer)
                if len(ids) + run.max_new_tokens > run.seq_len:
                    problem = f"{len(ids)} tokens and --max-new-tokens {run.max_new_tokens}"
                    raise UserError(f"{where}: {problem} exceed --seq-len {run.seq_len}: raise it")
                splits[split_of(f"{document_name(file)}:{number}")].append((ids, record))
    return splits["train"], splits["val"]


def prompts_of_step(task: Task, numbers: Sequence[int]) -> list:
    """Return the prompts that a step's answers are to. `numbers` are the answers' numbers: the
    first one of the run has 0. Answers of a group follow each other. All prompts are asked once, in
    an order by the seed, before any is asked again."""
    prompts, run = task.job.train_set.prompts, task.run
    # After a resume with another --seq-len or --group, a step may begin between multiples of group.
    extra = numbers[0] % run.group
    return [prompts[window_of((n - extra) // run.group, len(prompts), run.seed)] for n in numbers]


def prompts_of_evaluation(task: Task) -> tuple[list, Sequence[int], int]:
    """Return the held-out prompts, repeated so that ranks can share them evenly; the numbers of the
    answers; and how many of them count."""
    prompts = task.job.val_set.prompts
    limit = min(task.run.eval_windows, len(prompts))
    padded = task.world.parallel.padded(limit)
    asked = [prompts[i % limit] for i in range(padded)]
    return asked, range(-1, -1 - padded, -1), limit  # answers of training have none below 0


def check_can_sample(task: Task) -> None:
    """Raise UserError where sampling does not fit, or would not sample what is trained."""
    parallel = task.world.parallel
    if parallel.shard > 1 and not task.whole_model_fits:
        problem = "sampling needs all weights on each rank, and they do not fit"
        raise UserError(f"{problem}: give a larger --tp")
    if any(technique.gain != 1 for technique in used_techniques(parallel)):
        raise UserError("products in 8 bits would differ in sampling: leave them out")


class Trace:
    """What a model computes of the tokens that it draws: log p, without temperature, top_k and
    top_p; and what layers that keep their choices (techniques/technique.py) choose for tokens of
    prompts and answers. techniques/decoding.py calls read, computed and drawn, which write in
    place, as a GPU repeats steps. What stands after the end of an answer means nothing."""

    def __init__(self, model: Llama, steps: int, rows: int):
        device = next(model.parameters()).device
        self.layers = layers_that_choose(model)
        self.log_p = torch.zeros(steps, rows, dtype=widest_float(device), device=device)
        self.of_prompts = []  # choices for pieces of distinct prompts [distinct, T, layers, K]
        # choices[i] are those for token i - 1 of each answer, which is read to draw token i.
        self.choices: Tensor | None = None  # [steps, B, layers, K]

    def read(self, piece: Tensor) -> None:
        """Note the choices for a piece of the prompts [distinct, T]."""
        if self.layers:
            chosen = self.newest_choices()
            self.of_prompts.append(chosen.unflatten(0, piece.shape))
            self.choices = chosen.new_zeros(*self.log_p.shape, *chosen.shape[1:])

    def computed(self, place: tuple[Tensor, Tensor]) -> None:
        """Note the choices for the newest tokens; `place` has the step and the rows."""
        if self.layers:
            self.choices[place] = self.newest_choices()

    def newest_choices(self) -> Tensor:
        """Return the choices of the last forward [tokens, layers, K]. Raise UserError for a layer
        that does not note them: nor would it take those of sampling in training."""
        for layer in self.layers:
            if layer.chosen is None:
                name = type(layer).__name__
                raise UserError(f"{name} chooses by itself: let it call self.best(ranking)")
        return torch.stack([layer.chosen for layer in self.layers], 1).short()

    def drawn(self, place: tuple[Tensor, Tensor], logits: Tensor, tokens: Tensor) -> None:
        """Note log p of tokens [rows], which were drawn from logits [rows, V]."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = wide.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        self.log_p[place] = log_p.to(self.log_p.dtype)

    def choices_of(self, prompts: list[list[int]], answers: list[list[int]]) -> list[Tensor]:
        """Return the choices for each token that training computes of prompt and answer: of each
        row [tokens, layers, K]. The last token is none of them. Return [] without such layers."""
        if not self.layers:
            return []
        of_distinct = torch.cat(self.of_prompts, 1)  # left-padded
        distinct = [*dict.fromkeys(map(tuple, prompts))]
        rows = []
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            of_prompt = of_distinct[distinct.index(tuple(prompt)), -len(prompt) :]
            of_answer = self.choices[1 : len(answer), i]
            rows.append(torch.cat([of_prompt, of_answer]))
        return rows


class Sampled(NamedTuple):
    """Answers that were drawn, and what the model has computed of their tokens."""

    answers: list[list[int]]
    log_p: Tensor  # of the tokens of answers [B, tokens]
    choices: list[Tensor]  # as Trace.choices_of returns them


def sample(
    model: Llama,
    prompts: list[list[int]],
    numbers: Sequence[int],
    run,
    stop: tuple[int, ...],
    world: World,
) -> Sampled:
    """Return an answer to each prompt. Tokens are drawn at temperature 1 and without top_k and
    top_p, from the distribution that is trained; `numbers` seed them."""
    replay(model, None)
    parallel = world.parallel
    trace = Trace(model, run.max_new_tokens, len(prompts))
    in_training = model.training
    model.eval()
    # With a compute_dtype autocast casts the weights, once. Compiled blocks would for every token.
    compiled = parallel.compile and not model.compute_dtype
    stance = "default" if compiled else "force_eager"
    # Only the first forward communicates, since it all-gathers weights: ranks may then stop at
    # different times. Where each forward sends tokens to other ranks, all run equally often.
    over_ranks = partial(largest_over_ranks, world) if parallel.forwards_meet else int
    with weights_gathered(model, parallel), torch.compiler.set_stance(stance):
        answers = generate(
            model,
            prompts,
            run.max_new_tokens,
            stop=stop,
            seed=run.seed,
            numbers=numbers,
            trace=trace,
            compiled=compiled,
            over_ranks=over_ranks,
        )
    model.train(in_training)
    return Sampled(answers, trace.log_p.T, trace.choices_of(prompts, answers))


def largest_over_ranks(world: World, number: int) -> int:
    return int(world.all_gather_scalars([number]).amax())


def layers_that_choose(model: Llama) -> list[nn.Module]:
    """Return the layers that keep what they choose for each token."""
    return [layer for layer in model.modules() if getattr(layer, "keeps_choices", False)]


def replay(model: Llama, batch: Batch | None) -> None:
    """Let the layers that keep their choices take those of a microbatch; without one, the best."""
    for i, layer in enumerate(layers_that_choose(model)):
        layer.given = None
        if batch:
            choices = batch.target_values["choices"][:, :, i]  # [B, T, K]
            layer.given = choices.flatten(0, 1).long()


def samples_of(prompts: list, answers: list, are_counted: Sequence[bool]) -> list[Encoded]:
    """Return each prompt with its answer, whose tokens are targets if it is counted."""
    samples = []
    for prompt, answer, is_counted in zip(prompts, answers, are_counted):
        is_target = [False] * len(prompt) + [is_counted] * len(answer)
        samples.append((prompt + answer, is_target))
    return samples


class Answers(Rows):
    """Rows of a prompt and its answer, whose tokens are the targets. A batch has values of
    each target, 0 elsewhere: the `advantage` of its answer, `sampled_log_p`, its log p by the
    sampler, `begins`, 1 for the first target of an answer, since with --cp each rank has a part of
    an answer, and the `choices` of experts, if there are any. An answer that `are_counted` leaves
    out has no targets."""

    def __init__(
        self,
        prompts: list,
        answers: list,
        log_p: Tensor,
        advantages: Tensor,
        are_counted: Sequence[bool],
        tokenizer: Tokenizer,
        choices: Sequence[Tensor] = (),  # of layers with experts, of each row [tokens, layers, K]
    ):
        super().__init__(samples_of(prompts, answers, are_counted), tokenizer)
        self.log_p = log_p.cpu()
        self.advantages = advantages.to(log_p.dtype)
        self.choices = choices

    def batch(self, indices: Sequence[int], multiple: int = 1) -> Batch:
        batch = super().batch(indices, multiple)
        is_target = batch.targets != IGNORE
        advantage = self.log_p.new_zeros(batch.targets.shape)
        sampled_log_p, begins = advantage.clone(), advantage.clone()
        for row, i in enumerate(indices):
            columns = is_target[row].nonzero().flatten()
            advantage[row, columns] = self.advantages[i]
            sampled_log_p[row, columns] = self.log_p[i, : len(columns)]
            begins[row, columns[:1]] = 1
        values = dict(advantage=advantage, sampled_log_p=sampled_log_p, begins=begins)
        if self.choices:
            rows = [self.choices[i] for i in indices]
            shape = *batch.targets.shape, *rows[0].shape[1:]
            values["choices"] = choices = rows[0].new_zeros(shape, device="cpu")
            for row, of_row in enumerate(rows):
                choices[row, : len(of_row)] = of_row
        return replace(batch, target_values=values)


class Answered(NamedTuple):
    """This rank's share of a step's answers, and what is known of those of all ranks."""

    batch: Batch  # whose targets are the tokens of answers
    measured: dict[str, float]
    shown: str  # the first prompt with its answer


def answered(task: Task, asked: list, numbers: Sequence[int], counted: int) -> Answered:
    """Answer prompts, each (ids, record), which ranks share. Answers to the first `counted` of them
    have targets."""
    job, world = task.job, task.world
    started = time.perf_counter()
    own = slice(world.data_rank, None, world.parallel.data_size)  # every so-many-th is this rank's
    prompts = [ids for ids, _ in asked[own]]
    stop = job.tokenizer.stop
    answers = sample(job.model, prompts, numbers[own], task.run, stop, world).answers
    are_counted = [i < counted for i in range(len(asked))[own]]
    samples = samples_of(prompts, answers, are_counted)
    own_counted = answers[: sum(are_counted)]
    ended = sum(answer[-1] in stop for answer in own_counted)
    length = sum(map(len, own_counted))
    sums = world.all_gather_scalars([ended, length]).sum(0)
    copies = world.size / world.parallel.data_size  # ranks that have the same answers
    ended, length = (sums / copies).tolist()
    measured = {
        "end": ended / counted,
        "length": length / counted,
        "sampling_seconds": time.perf_counter() - started,
    }
    rows = Rows(samples, job.tokenizer)
    batch = batch_of(rows, range(len(rows)), world)
    ids, _ = samples[0]
    return Answered(batch, measured, f"--- {job.tokenizer.decode(ids)}\n---")
