"""A process that has already imported torch, transformers and peft, and forks those that tests ask for.

These imports take 8 s of CPU, and the tests start dozens of ranks. So torchrun starts this file in place of a script:

    python tests/warm.py SCRIPT ARG...

hands arguments, environment, folder and output to the warm process, which forks one that runs the script as a fresh
interpreter would; this one passes signals on and ends as that one ends. Tests that kill ranks or look at them from
outside start the script itself.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "WARM_PROCESS"  # environment variable: path of its socket
OUTPUTS = (1, 2)


@functools.cache
def start_server() -> str:
    """Returns the address of this process' warm process, which lives as long as this one."""
    address = tempfile.mkdtemp(prefix="warm-") + "/socket"
    own = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, __file__, "--serve", address], env=own, start_new_session=True, **pipes)
    assert server.stdout.readline(), "the warm process died"
    _servers.append(server)  # its standard input stays open until this process ends, however it ends
    return address


_servers: list[subprocess.Popen] = []


def serve(address: str) -> None:
    """Forks until the pipe to the process that wanted it breaks; returns in those that were asked for."""
    import contrastors.evaluation
    import contrastors.loading  # noqa: F401

    gc.freeze()  # or each fork would walk through all that was imported, and copy it, when it ends
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return become(connection)
        connection.close()
    Path(address).unlink()
    Path(address).parent.rmdir()
    os.killpg(0, signal.SIGKILL)  # and whatever is left of those that were asked for


def become(connection: socket.socket) -> None:
    """Returns in the process that was asked for, made ready; another one tells how it ends."""
    _, outputs, _, _ = socket.recv_fds(connection, 1, len(OUTPUTS))
    file = connection.makefile("rw", encoding="utf-8")
    order = json.loads(file.readline())
    process = os.fork()
    if process:
        print(process, file=file, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=file, flush=True)
        os._exit(0)
    connection.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output, number in zip(outputs, OUTPUTS, strict=True):
        os.dup2(output, number)
        os.close(output)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[:] = order["arguments"]
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path(sys.argv[0]).resolve().parent), *filter(None, places), *sys.path]
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()


def ask(address: str, arguments: list[str]) -> int:
    """Returns the exit code of a forked process that runs a script."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [b"\0"], OUTPUTS)
    file = connection.makefile("rw", encoding="utf-8")
    order = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    print(json.dumps(order), file=file, flush=True)
    process = int(file.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: os.kill(process, received))
    code = int(file.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        sys.exit(ask(os.environ[ADDRESS], sys.argv[1:]))
    serve(sys.argv[2])
    runpy.run_path(sys.argv[0], run_name="__main__")
