"""The student's function, as a check calls it.

What would escape the counts is refused. If a check finds nothing wrong, it runs again, and AGAIN is
true: what a function is given has to stay as it was, and it is called with other numbers once
before and twice after, before anybody uses what it returned. Whoever keeps something between calls
gets wrong numbers then.
"""

import contextlib
import functools
import gc
import importlib.util
import inspect
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from labs.machinery.ranks import NotedWork

AGAIN = False
ONCE = (
    "Right if it is called once. But before and after, it may be called with other tensors: keep "
    "nothing outside of what you return, or of ctx."
)
TORCH = str(Path(torch.__file__).parent)
SHARDING = """
torch.distributed.fsdp.fully_shard torch.distributed.fsdp.FullyShardedDataParallel
torch.distributed.tensor.DTensor torch.distributed.tensor.distribute_tensor parallel.parallelize
""".split()  # what PyTorch and the project have for it
HIDDEN = re.compile(
    r"(?<![a-z])(distributed_c10d|torch\.ops|_getframe|currentframe|f_back|f_locals|get_objects|"
    r"from_file|fork_exec|ctypes)(?![a-z])"
)
THREADS = "What threads send and keep is not counted here: write it without a thread."
MOVED = "{} takes numbers out of tensors, in which memory is counted: keep them as a tensor."
CHANGED = "{} changes `{}`{}. It belongs to the caller: work on a copy."
GROUPS = "{} makes a group in every call, for which all ranks wait: make it once."
OVERWRITES = "The second call of {} changes what the first returned: return a tensor of its own."
KEEPS = "Each call of {} keeps {} more tensors or handles in memory, for ever: drop what is used."


class Misuse(Exception):
    """The student's function did what it must not, in a sentence for the student."""


class Refused:
    """Stands for what is barred: calling it, or using what belongs to it, is an error. PyTorch's
    own code may go on using it."""

    def __init__(self, name: str, original: object):
        self.name, self.original = name, original

    def __call__(self, *args, **kwargs):
        return self._for(sys._getframe(1))(*args, **kwargs)

    def __getattr__(self, attribute: str):
        return getattr(self._for(sys._getframe(1)), attribute)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self.original)

    def _for(self, caller: FrameType) -> object:
        if not caller.f_code.co_filename.startswith(TORCH):
            raise RuntimeError(f"{self.name} is what you are to write")
        return self.original


@contextlib.contextmanager
def barred(*places: str) -> Iterator[None]:
    """Within this context, what stands at `places`, as "module.name", is Refused."""
    with contextlib.ExitStack() as stack:
        for place in places:
            path, _, name = place.rpartition(".")
            module = importlib.import_module(path)
            refused = Refused(name, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, refused))
        yield


def on_rank(lab: ModuleType, path: Path, size: int, seed: int, rank: int) -> object:
    """Return what a lab's check finds out on this rank, where what it bars is barred."""
    with barred(*getattr(lab, "BARRED", ())):
        return lab.on_rank(functools.partial(load_function, path, lab.FUNCTION), size, seed, rank)


def load_function(path: Path, name: str, overwrites: bool = False) -> Callable:
    """Return a function of the student's file, watched; it `overwrites` what it is given if its
    docstring says so."""
    refuse_what_is_not_counted(path)
    return watched(read_function(path, name), path, overwrites)


def read_function(path: Path, name: str) -> Callable:
    """Return a function of the student's file. Raises AttributeError if it is not there."""
    spec = importlib.util.spec_from_file_location("student", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise AttributeError(f"{path.name} defines no function {name}")
    return getattr(module, name)


def refuse_what_is_not_counted(path: Path) -> None:
    """Let threads, PyTorch's inner modules and numpy raise Misuse in the student's file."""
    if word := HIDDEN.search(path.read_text()):
        raise Misuse(f"{word[1]} goes past what is counted here: write it without.")

    def refused(original: Callable, text: str) -> Callable:
        def call(*args, **kwargs):
            if sys._getframe(1).f_code.co_filename == str(path):
                raise Misuse(text)
            return original(*args, **kwargs)

        return call

    threading.Thread.start = refused(threading.Thread.start, THREADS)
    for method in ("numpy", "__array__"):
        setattr(Tensor, method, refused(getattr(Tensor, method), MOVED.format(method)))


def watched(function: Callable, path: Path, overwrites: bool = False) -> Callable:
    """Return the student's function with checks of what a call leaves behind."""
    name = getattr(function, "__name__", "your function")
    is_new = True

    @functools.wraps(function, assigned=("__name__",))
    def call(*args, **kwargs):
        nonlocal is_new
        with _disable_current_modes():
            groups = len(dist.distributed_c10d._world.pg_map)
            has_module = any(isinstance(value, nn.Module) for value in tree_leaves(args))
            has_tensors = bool(contents(args))
            again = AGAIN and is_new and has_tensors and not has_module
            if again:  # whoever keeps what comes first uses it below
                is_new = False
                call_with_others(function, args)
        if AGAIN and has_tensors and not overwrites:
            result = call_on_kept_tensors(function, path, args, kwargs)
        else:
            result = function(*args, **kwargs)
        with _disable_current_modes():
            if any(callable(r) and not isinstance(r, Tensor) for r in tree_leaves(result)):
                return tree_map(lambda r: watched(r, path) if callable(r) else r, result)
            if len(dist.distributed_c10d._world.pg_map) > groups:
                raise Misuse(GROUPS.format(name))
            if again:
                first = contents(result)
                more = kept_by_call(lambda: call_with_others(function, args))
                if changed(result, first):
                    raise Misuse(OVERWRITES.format(name))
                if more > 0:
                    raise Misuse(KEEPS.format(name, more))
        return result

    return call


def call_on_kept_tensors(function: Callable, path: Path, args: tuple, kwargs: dict) -> object:
    """Return what the student's function returns. Raises Misuse if a tensor that it was given has
    other numbers then, with the line of the student's file that changed it."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # it takes other arguments; or is autograd.Function's apply
        given = {f"argument {number}": value for number, value in enumerate(args, 1)}
    with _disable_current_modes():
        before = {name: contents(value) for name, value in given.items()}
    changed_in = {}
    last_line = 0

    def note(frame: FrameType, event: str, _) -> Callable | None:
        """Before each line of the student's file, look at what the last one has changed."""
        nonlocal last_line
        if frame.f_code.co_filename != str(path):
            return None
        with _disable_current_modes():
            for name, value in given.items():
                if name not in changed_in and changed(value, before[name]):
                    changed_in[name] = f" in line {last_line}" * (last_line > 0)
        last_line = frame.f_lineno
        return note

    others = sys.gettrace()
    sys.settrace(note)
    try:
        result = function(*args, **kwargs)
    finally:
        sys.settrace(others)
    with _disable_current_modes():
        for name, value in given.items():
            if changed(value, before[name]):
                called = getattr(function, "__name__", "your function")
                raise Misuse(CHANGED.format(called, name, changed_in.get(name, "")))
    before.clear()  # `note` refers to itself, and would keep these tensors alive
    given.clear()
    return result


def call_with_others(function: Callable, args: tuple) -> None:
    """Call the student's function with other numbers."""
    with torch.random.fork_rng(devices=[]):
        function(*tree_map(other_numbers, args))


def kept_by_call(call: Callable[[], object]) -> int:
    """Return how many more tensors and handles there are after two calls than after one."""
    call()
    before = tensors_alive(at_most=0)
    call()
    return tensors_alive(at_most=before) - before


def contents(values: object) -> list[Tensor]:
    return [v.detach().clone() for v in tree_leaves(values) if isinstance(v, Tensor)]


def changed(values: object, before: list[Tensor]) -> bool:
    now = [v.detach() for v in tree_leaves(values) if isinstance(v, Tensor)]
    equal = (torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(now, before))
    return len(now) != len(before) or not all(equal)


def other_numbers(value: object) -> object:
    """Return a tensor like this one, with its numbers in the opposite order; integers stay."""
    if not isinstance(value, Tensor):
        return value
    turned = [*range(value.dim())] if value.is_floating_point() else []
    other = value.detach().flip(turned)
    other = nn.Parameter(other) if isinstance(value, nn.Parameter) else other
    other.requires_grad_(value.requires_grad)
    other.grad = value.grad.clone() if value.is_leaf and value.grad is not None else None
    return other


def tensors_alive(at_most: int) -> int:
    """Return the number of tensors and handles of collectives that Python knows. While it is more
    than `at_most`, wait a little: a collective may free its tensors later."""
    for _ in range(20):
        gc.collect()
        number = sum(issubclass(type(thing), Tensor | NotedWork) for thing in gc.get_objects())
        if number <= at_most:
            break
        time.sleep(0.01)
    return number


def check_returned(value: object, kind: type | tuple[type, ...], what: str) -> object:
    """Return what a student's function returned. Raises TypeError if it is not `what`, values of
    this kind."""
    values = value if isinstance(kind, tuple) and isinstance(value, tuple) else (value,)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if len(values) != len(kinds) or not all(map(isinstance, values, kinds)):
        got = ", ".join(type(v).__name__ for v in values) if value is not None else "None"
        raise TypeError(f"your function returned {got}, and should return {what}")
    return value
