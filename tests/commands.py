"""`run`: a Python command in a process of its own, but without waiting for its imports.

Python takes five seconds to import torch, transformers and the rest. So one process does that once, and forks a child
for each command, which does what `python file.py ...` or `python -c code ...` does from there on (not quite: all share
a hash seed, and what those packages read of the environment while they are imported). It never computes itself:
autograd does not work in the child of a process that did. `run_alone` is a Python of its own.
"""

import atexit
import faulthandler
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def run(*command, cwd=ROOT, env=ENV, stdin=""):
    """What `python *command` leaves: a CompletedProcess with returncode, stdout and stderr."""
    return run_together(command, cwd=cwd, env=env, stdin=stdin)[0]


def run_alone(*command, cwd=ROOT, env=ENV):
    """The same from a Python that was started for it."""
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)


def run_together(*commands, cwd=ROOT, env=ENV, stdin=""):
    """The same for commands that start at the same moment."""
    with tempfile.TemporaryDirectory() as place:
        jobs = []
        for number, command in enumerate(commands):
            files = [os.path.join(place, f"{name}{number}") for name in ("in", "out", "err")]
            Path(files[0]).write_text(stdin)
            jobs.append({"command": [*map(str, command)], "cwd": str(cwd), "env": dict(env), "files": files})
        print(json.dumps(jobs), file=server().stdin, flush=True)
        codes = json.loads(server().stdout.readline())
        texts = [[Path(file).read_text() for file in job["files"][1:]] for job in jobs]
    return [subprocess.CompletedProcess(*all_) for all_ in zip(commands, codes, *zip(*texts, strict=True), strict=True)]


@functools.cache
def server():
    """The process that has imported everything; it ends when this one closes its input."""
    code, pipe = "import commands; commands.serve()", subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT / "tests",
        env=ENV,
        stdin=pipe,
        stdout=pipe,
        text=True,
    )


def serve():
    """Fork a child for each command of a line, and answer with their exit codes when all have ended."""
    import torch._dynamo  # an optimiser imports it
    import tyro  # noqa: F401
    import wandb  # noqa: F401
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in jobs:
        pids = [os.fork() or play(**job) for job in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), file=answers, flush=True)


def play(command, cwd, env, files):
    """Be `python *command`, and end as it does."""
    for fd, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), fd)
    faulthandler.dump_traceback_later(300, exit=True)  # a command that hangs
    os.chdir(cwd)
    os.environ.clear(), os.environ.update(env)
    is_code, code = command[0] == "-c", 0
    home = "" if is_code else os.path.dirname(os.path.abspath(command[0]))
    sys.path[:1] = [home, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [command[0], *command[1 + is_code :]]
    try:
        if is_code:
            exec(command[1], {"__name__": "__main__"})
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        traceback.print_exc()
    threading._shutdown(), atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
