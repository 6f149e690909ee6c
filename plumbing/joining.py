"""How the processes that torchrun starts join, and what each watches and agrees on from then on."""

import atexit
import contextlib
import ctypes
import math
import os
import signal
import socket
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from plumbing.devices import take_gpu
from plumbing.heartbeats import stop_watching, watch_next_rank
from plumbing.messages import UserError
from plumbing.processes import Process, fail, processes_on_this_node, shared_store

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a collective that waits longer ends the run


def init_distributed() -> Process:
    """Join the processes that torchrun started; without torchrun, form a world of size 1."""
    refuse_other_launchers()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = own_device(local_rank)
    if "RANK" in os.environ:
        store, rank, size, address = join_torchruns_store()
    else:
        store, rank, size, address = dist.HashStore(), 0, 1, None
    register_gloo(address)
    backend = "cpu:one_thread_gloo,cuda:nccl" if device.type == "cuda" else "one_thread_gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    if size > 1:
        given = shared_store().clone(), rank, size
        watcher = threading.Thread(target=watch_next_rank, args=given, daemon=True)
        watcher.start()
        atexit.register(stop_watching, watcher)
        signal.signal(signal.SIGTERM, exit_late)
    ranks = [None] * size  # of all, since they are to build the same mesh
    dist.all_gather_object(ranks, (processes_on_this_node(), device.type))
    per_node, devices = zip(*ranks)
    if len(set(devices)) > 1:
        without = devices.index("cpu")
        raise UserError(f"rank {without} finds no GPU, and others do: see nvidia-smi on its node")
    # Nodes may have different numbers of ranks: a "node" of the mesh is what divides all of them.
    return Process(rank, size, local_rank, math.gcd(*per_node), device)


def refuse_other_launchers() -> None:
    """Raise UserError if srun or mpirun has started several processes, and not torchrun."""
    if "RANK" in os.environ:
        return
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(os.environ.get(name, "1")) > 1:
            raise UserError(
                f"{name} is {os.environ[name]}, and each of these processes would run alone: start "
                f"torchrun, once on each node (docs/cluster.md)"
            )


def own_device(local_rank: int) -> torch.device:
    """Return the GPU of this process, if there are GPUs, and take it; else the CPU."""
    if not torch.cuda.is_available():
        keep_freed_memory()
        return torch.device("cpu")
    here = processes_on_this_node()
    gpus = torch.cuda.device_count()
    if here > gpus:
        raise UserError(f"--nproc-per-node {here} on a node of {gpus} GPUs: at most {gpus}")
    device = torch.device("cuda", local_rank)
    take_gpu(device)
    return device


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones. glibc gives large
    blocks back to the system. The next tensor then gets new pages, and the first write to a new
    page takes several times as long as a later one. Other C libraries have no `mallopt`."""
    with contextlib.suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free bytes at the end of the heap
        # M_MMAP_THRESHOLD: larger blocks still come from the system. Before 2.35 glibc refuses
        # more than 32 MiB, and keeps its smallest threshold.
        set_option(-3, 2**30) or set_option(-3, 2**25)


# ----------------------------------------------------------------------------------- the store


def join_torchruns_store() -> tuple[dist.Store, int, int, str | None]:
    """Return the store of all ranks, this rank, the world size, and this node's address."""
    address = None
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_torchruns:
        check_restarts()
        address = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, rank, size = next(dist.rendezvous("env://"))
    if is_torchruns:  # after a restart it still holds the keys of the previous attempt
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    return store, rank, size, address


def check_restarts() -> None:
    """Raise UserError if torchrun may restart ranks on several nodes, and they would use its store:
    each node counts attempts by itself, so ranks would look for each other under other numbers."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if several and may_restart and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        raise UserError(
            "--max-restarts on several nodes: first export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on "
            "each, or ranks do not meet after a restart"
        )


def own_address(host: str, port: int) -> str:
    """Return this node's address on its way to the first node, to torchrun's store.

    Raise DistNetworkError if torchrun there, whose store exists before any rank starts, has died:
    the store's own client would try again for half an hour."""
    try:
        with socket.create_connection((host, port), timeout=30) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        raise dist.DistNetworkError(f"{error} ({host}, port {port})")


def register_gloo(address: str | None) -> None:
    """Let init_process_group know `one_thread_gloo`, a gloo backend that runs the collectives of
    its group in one thread.

    By default two threads do. After each collective, its thread assigns the collective's name to a
    string of the group without a lock (as of torch 2.13). If both do so at once, they corrupt the
    heap, and the process crashes sooner or later.

    `address`: where other ranks reach this node. By default it is what the host's name resolves to,
    which on some systems is 127.0.1.1."""

    def one_thread_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta):
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        try:
            devices = [gloo.create_device(interface=name) for name in interfaces if name]
            if not devices and address:
                devices = [gloo.create_device(hostname=address)]
            options._devices = devices or [gloo.create_default_device()]
        except RuntimeError as error:  # even a single process has to listen somewhere
            raise UserError(f"{error}: ip link set lo up, or export GLOO_SOCKET_IFNAME=lo")
        options._threads = 1
        options._timeout = timeout
        return gloo(store, rank, size, options)

    dist.Backend.register_backend("one_thread_gloo", one_thread_gloo, devices=["cpu"])


def exit_late(signal_number: int, frame) -> None:
    """Handle SIGTERM, which torchrun sends to all ranks when one has died: stay alive until the
    watching threads have found out which. The training loop has a handler of its own."""
    message = f"rank {dist.get_rank()} was ended by SIGTERM"
    fail(shared_store(), 128 + signal_number, message, peer_lost=True)
