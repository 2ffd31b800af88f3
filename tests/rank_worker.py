"""The program of one of ranks.py's workers: does jobs until its socket closes.

A job is a tuple, `_do`'s arguments; the answers are ("entered", time, None), then ("result", time,
packed value) or ("error", time, (type name, message, traceback)). The job None means that no rank
waits for another any more: ("rested", time, None). Times are time.monotonic(), one for all.
"""

import ctypes
import faulthandler
import gc
import importlib.util
import io
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def packed(value: Any) -> bytes:
    # Not ForkingPickler, which sends handles of shared memory that end with the sender.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def work(connection: Connection, rank: int, count: int) -> None:
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if job is not None:
            _do(connection, rank, count, *job)
            continue
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send(("rested", time.monotonic(), None))


def _do(
    connection: Connection,
    rank: int,
    count: int,
    meeting: str,  # a file in which the ranks of this job find each other
    path: list[str],
    module: str,
    file: str,
    name: str,
    args: bytes,
    once: bool,
) -> None:
    kind: str
    payload: Any
    try:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        sys.path[:] = path
        function = attrgetter(name)(_module(module, file))
        given = unpacked(args)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count
        )
        connection.send(("entered", time.monotonic(), None))
        kind, payload = "result", packed(function(rank, *given))
    except BaseException as error:  # pytest.fail's is no Exception
        text = "".join(traceback.format_exception(error))
        kind, payload = "error", (type(error).__name__, str(error), text)
    connection.send((kind, time.monotonic(), payload))
    if once:
        # Not sys.exit: a gloo group first waits for its unfinished work, and its peers with it.
        os._exit(0 if kind == "result" else 1)


def _module(name: str, file: str) -> Any:
    """The module at `file`, under the name that pytest gave it: objects are pickled by it."""
    known = sys.modules.get(name)
    if known is not None and known.__file__ == file:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gc.collect()
    gc.freeze()  # as conftest.py does: the collector is called before every job
    return module


def main(descriptor: str, parent: str, rank: str, count: str, stacks: str) -> None:
    # If the test process is killed, even from outside, no worker stays. The kernel means the
    # thread that started the worker, so a test calls run() from a thread that lives on.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's name need not resolve
    faulthandler.enable()
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        work(Connection(int(descriptor)), int(rank), int(count))
        faulthandler.unregister(signal.SIGUSR1)


if __name__ == "__main__":
    main(*sys.argv[1:])
