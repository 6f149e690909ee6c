"""Notice that another rank has failed, has died or keeps all waiting: a thread in each rank.

A rank that waits in a collective cannot notice that another has failed. So a thread in each rank
writes a heartbeat to the store once a second, and reads that of the next rank. It ends its own
process when some rank has failed, or when the next rank's heartbeat stops.
"""

import json
import socket
import sys
import threading
import time

import torch.distributed as dist

from plumbing import endings, stuck
from plumbing.messages import print_rank_zero
from plumbing.processes import PEER_LOST_TIMEOUT, fail, resume_hint

HEARTBEAT_TIMEOUT = 20  # seconds without a heartbeat after which a rank counts as dead
GRACE = 5  # seconds in which all ranks notice that they are stuck

_script_ended = threading.Event()  # set when Python exits; ends the watching thread


def watch_next_rank(store: dist.Store, rank: int, size: int) -> None:
    """Send a heartbeat every second, expect the next rank's, and end this process when some rank
    has failed. The store serves a few small requests a second from each rank."""
    next_rank = NextRank(store, (rank + 1) % size)
    reports = Reports(store, rank)
    while True:
        try:
            send_heartbeat(store, rank)
            if signal := endings.asked_to_end():  # all may wait for what one computes
                store.set("asked to end", str(signal))
            failed = store.check(["failed"])
            peer_lost = store.check(["peer lost"])
            silence = next_rank.seconds_of_silence()
            reports.update(peer_lost)
        except dist.DistError:
            failed = True
        if failed:
            if not _script_ended.wait(PEER_LOST_TIMEOUT):  # it may be about to exit by itself
                fail(store, 1, "")
            return
        limit = PEER_LOST_TIMEOUT if peer_lost else HEARTBEAT_TIMEOUT
        if silence > limit:
            fail(store, 1, f"{next_rank} has died or is frozen{resume_hint(store)}")
        if _script_ended.wait(1):
            return


def stop_watching(watcher: threading.Thread) -> None:
    _script_ended.set()
    watcher.join()  # a thread in the middle of a request would crash Python's exit


def send_heartbeat(store: dist.Store, rank: int) -> None:
    """Say that this rank lives, and where it is. No two heartbeats are equal."""
    line, _ = stuck.position()
    where = f"on {socket.gethostname()} (last at step {stuck.last_step.number or 0}, {line})"
    store.set(f"heartbeat of rank {rank}", f"{where}, {time.monotonic()}")


class NextRank:
    """The rank whose heartbeat this one expects."""

    def __init__(self, store: dist.Store, rank: int):
        self.store = store
        self.rank = rank
        self.last_heartbeat = b""
        self.heard_at = time.monotonic()

    def seconds_of_silence(self) -> float:
        """Return for how long the rank has not written another heartbeat; 0 once it is done."""
        key = f"heartbeat of rank {self.rank}"
        heartbeat = self.store.get(key) if self.store.check([key]) else b""  # get alone would wait
        if heartbeat != self.last_heartbeat or self.store.check([f"rank {self.rank} is done"]):
            self.last_heartbeat = heartbeat
            self.heard_at = time.monotonic()
        return time.monotonic() - self.heard_at

    def __str__(self) -> str:
        where, _, _ = self.last_heartbeat.decode().rpartition(",")
        return f"rank {self.rank} {where or 'on an unknown host'}"


class Reports:
    """What is told of a step that does not end: every rank says where it is, and rank 0 prints who
    waits for whom."""

    def __init__(self, store: dist.Store, rank: int):
        self.store = store
        self.rank = rank
        self.reported = -1  # the step after which this rank has reported
        self.told = -1  # the step after which rank 0 has printed

    def update(self, peer_lost: bool) -> None:
        step, ended_at, report_at = stuck.last_step
        late = time.monotonic() - report_at
        if (late > 0 or peer_lost) and self.reported != step:
            self.reported = step
            self.store.set(f"report of rank {self.rank}", json.dumps(stuck.report()))
        if self.rank == 0 and late > GRACE and self.told != step:
            self.told = step
            line = stuck.who_waits(self.store)
            self.store.set("stuck", json.dumps([step, line]))
            seconds = time.monotonic() - ended_at
            print_rank_zero(f"no step for {seconds:.0f} s: {line}", file=sys.stderr)
            endings.report(line + resume_hint(self.store))  # NCCL may abort this process
        elif self.told not in (-1, step):  # it has gone on
            self.told = -1
            endings.report("")
