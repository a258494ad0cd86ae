"""Running a learner's file in another process: whatever it does gives a message, and leaves nothing behind."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from anybatch.errors import AnybatchError, NotAvailableError
from anybatch.learn.runner import submissions
from anybatch.learn.runner.isolation import Limits
from anybatch.learn.runner.submissions import Ended, Runner

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads processes from /proc")

SECRET = "the answer is " + secrets.token_hex(8)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A folder that no check may read."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "solution.py").write_text(f"SECRET = {SECRET!r}\n")
    return folder


@pytest.fixture(scope="module")
def first_runner(course):
    with Runner(Limits(memory=2**30), hidden=[course]) as runner:
        yield runner


@pytest.fixture
def runner(first_runner):
    yield first_runner
    assert left_by(first_runner) == ([], ["fork_server.log"])


def held(runner, **limits):
    """The runner with other limits. It uses the same fork server."""
    other = copy.copy(runner)
    other.limits = dataclasses.replace(runner.limits, **limits)
    other._order = runner._order | {"limits": dataclasses.asdict(other.limits)}
    return other


def children_of(runner):
    pid = runner._fork_server.process.pid
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def left_by(runner, seconds=5.0):
    """The processes and files that are left after some time."""
    folder = runner._fork_server.folder
    deadline = time.monotonic() + seconds
    while True:
        processes = children_of(runner)
        files = sorted(os.listdir(folder))
        if (not processes and len(files) == 1) or time.monotonic() > deadline:
            return processes, files
        time.sleep(0.02)


def is_running(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids, seconds=5.0):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@dataclasses.dataclass
class Outcome:
    kind: str  # "answer", the type of an exception, or why it ended
    text: str
    line: int | None
    prints: str
    dropped: int


def outcome(runner, source, devices=1, compiled=False):
    """Loads a file, calls its `f`, and returns the outcome."""
    source = textwrap.dedent(source).lstrip("\n")
    request = {"function": "f", "args": (np.ones(3, np.float32),), "want": ("value",)}
    with runner.open(source, "exercise.py", devices=devices) as submission:
        try:
            reply = submission.loaded
            reply = reply if "error" in reply else submission.ask(request | {"compiled": compiled})
        except Ended as ended:
            with pytest.raises(Ended, match=re.escape(ended.message)):  # it stays ended
                submission.ask(request)
            line, text = ended.where or (None, None)
            assert line is None or text == source.splitlines()[line - 1]
            found = ended.kind, ended.message, line
        else:
            error = reply.get("error")
            found = (error["type"], error["message"], error["line"]) if error else ("answer", "", None)
        return Outcome(*found, submission.prints, submission.prints_dropped)


def test_a_file_is_loaded_and_asked(runner):
    source = "import jax\n\ndef f(x):\n    print('on', jax.device_count())\n    return {'a': 2 * x}\n"
    request = {"function": "f", "args": (np.arange(3.0, dtype=np.float32),), "want": ("value",)}
    with (
        runner.open(source, "one.py") as one,
        runner.open(source, "eight.py", devices=8) as eight,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        for reply in pool.map(lambda each: each.ask(request | {"compiled": True}), (one, eight)):
            np.testing.assert_array_equal(reply["value"]["leaves"][0], [0, 2, 4])
        assert one.loaded["functions"] == {"f": [1, 1]}
        assert (one.prints, eight.prints, eight.prints_dropped) == ("on 1\n", "on 8\n", 0)


def test_a_spare_is_taken_and_replaced(runner):
    runner.keep_warm([1])
    (spare,) = runner._spares[1]
    assert outcome(runner, "def f(x):\n    return x\n").kind == "answer"
    (other,) = runner._spares[1]
    assert other is not spare and spare.status is None
    runner.keep_warm([])
    assert runner._spares[1] == []


# name -> source, words of the message, the lines where it may be
ENDLESS = {
    "loop": ("def f(x):\n    while True:\n        pass\n", "still running after 1.5 seconds", (2, 3)),
    "loop when loaded": ("n = 0\nwhile True:\n    n += 1\n", "still running after 1.5 seconds", (2, 3)),
    "loop in XLA": (
        "import jax\n\ndef f(x):\n    y = jax.lax.while_loop(lambda _: True, lambda x: x + 1, x)\n    return y + 1\n",
        "still running after 1.5 seconds",
        (4, 5, None),
    ),
    "lock taken twice": (
        "import threading\nlock = threading.Lock()\ndef f(x):\n    with lock:\n        with lock:\n            pass\n",
        "still running after 1.5 seconds",
        (5,),
    ),
    "thread that never ends": (
        """
        import threading
        def f(x):
            thread = threading.Thread(target=threading.Event().wait)
            thread.start()
            thread.join()
        """,
        "still running after 1.5 seconds",
        (5,),
    ),
    "signals ignored": (
        """
        import signal, time
        for number in range(1, 32):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN)
        def f(x):
            time.sleep(100)
        """,
        "still running after 1.5 seconds",
        (None,),
    ),
    "stopped by itself": (
        "import os, signal\ndef f(x):\n    os.kill(os.getpid(), signal.SIGSTOP)\n",
        "still running after 1.5 seconds",
        (None,),
    ),
}


def test_what_never_ends_is_ended(runner):
    weaker = held(runner, seconds=1.5)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        begin = time.monotonic()
        outcomes = dict(zip(ENDLESS, pool.map(lambda each: outcome(weaker, each[0]), ENDLESS.values()), strict=True))
        assert time.monotonic() - begin < 15
    for name, (_, says, lines) in ENDLESS.items():
        found = outcomes[name]
        assert found.kind == "time" and says in found.text and found.line in lines, (name, found)


def test_computing_time_is_limited(runner):
    found = outcome(held(runner, seconds=20.0, cpu_seconds=1), "def f(x):\n    while True:\n        pass\n")
    assert found.kind == "time" and found.line in (2, 3)
    assert "computed for more than 1 seconds, on all cores" in found.text


ENDS = {
    "os._exit": ("import os\ndef f(x):\n    os._exit(0)\n", "exit", "(exit code 0) before it returned an answer"),
    "os._exit when loaded": ("import os\nos._exit(3)\n", "exit", "(exit code 3) before it returned an answer"),
    "sys.exit": ("import sys\ndef f(x):\n    sys.exit(0)\n", "SystemExit", "0"),
    "sys.exit when loaded": ("import sys\nsys.exit()\n", "SystemExit", ""),
    "recursion": ("def f(x):\n    return f(x)\n", "RecursionError", "maximum recursion depth"),
    "crash": ("import ctypes\ndef f(x):\n    ctypes.string_at(0)\n", "signal", "crashed its process (SIGSEGV)"),
    "abort": ("import os\ndef f(x):\n    os.abort()\n", "signal", "crashed its process (SIGABRT)"),
    "killed": (
        "import os\ndef f(x):\n    os.kill(os.getpid(), 9)\n",
        "memory",
        "killed your code (SIGKILL), most likely for its memory. A check may use 1.0 GiB",
    ),
    "an alarm": (
        "import signal, time\ndef f(x):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    time.sleep(9)\n",
        "signal",
        "ended its process (SIGALRM)",
    ),
    "a tracer": (
        "import sys\ndef g(*_):\n    raise ValueError('late')\nsys.settrace(g)\ndef f(x):\n    return x\n",
        "channel",
        "could not be sent: ValueError: late. The file has replaced something that is needed",
    ),
    "descriptors closed": ("import os\ndef f(x):\n    os.closerange(0, 4096)\n    return x\n", "channel", "connection"),
    "descriptors closed, and on": (
        "import os, time\ndef f(x):\n    os.closerange(0, 4096)\n    time.sleep(1)\n",
        "channel",
        "the file changed the connection that carries it",
    ),
    "garbage": (
        """
        import os
        def f(x):
            for descriptor in range(256):
                try:
                    os.write(descriptor, b"garbage" * 3)
                except OSError:
                    pass
            return x
        """,
        "channel",
        "answer was lost: the file changed the connection",
    ),
    "json replaced": ("import json\njson.dumps = lambda *_: '{}'\ndef f(x):\n    return x\n", "channel", "default"),
    "encoding fails": (
        "import json\njson.dumps = None\ndef f(x):\n    return x\n",
        "channel",
        "'NoneType' object is not",
    ),
    # These do not matter.
    "os replaced": ("import os\nos.write = os.read = os._exit = None\ndef f(x):\n    return x\n", "answer", ""),
    "stdout closed": ("import sys\ndef f(x):\n    sys.stdout.close()\n    return x\n", "answer", ""),
    "something at exit": (
        "import atexit, time\natexit.register(time.sleep, 99)\ndef f(x):\n    return x\n",
        "answer",
        "",
    ),
}


def test_ways_to_end(runner):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        outcomes = dict(zip(ENDS, pool.map(lambda each: outcome(runner, each[0]), ENDS.values()), strict=True))
    for name, (_, kind, says) in ENDS.items():
        assert outcomes[name].kind == kind and says in outcomes[name].text, (name, outcomes[name])
    assert outcomes["crash"].line == outcomes["abort"].line == 3


PRINTS = {
    "some": ("def f(x):\n    print('a' * 5000)\n    return x\n", "answer", 4000, 1001),
    "much": ("def f(x):\n    print('a' * 3_000_000)\n    return x\n", "prints", 4000, None),
    "endless": ("import os\ndef f(x):\n    while True:\n        os.write(2, b'b' * 1000)\n", "prints", 4000, None),
    "no text": ("import os\ndef f(x):\n    os.write(1, b'\\xff\\xfe')\n    return x\n", "answer", 2, 0),
    "before an end": ("import os\ndef f(x):\n    print('was here', end='')\n    os._exit(0)\n", "exit", 8, 0),
}


@pytest.mark.parametrize("name", PRINTS)
def test_prints_are_kept_up_to_a_limit(runner, name):
    source, kind, kept, dropped = PRINTS[name]
    found = outcome(runner, source)
    assert (found.kind, len(found.prints)) == (kind, kept)
    assert dropped in (None, found.dropped)
    if kind == "prints":
        assert "printed more than 1.0 MiB, and was stopped" in found.text


def test_threads_that_go_on_printing(runner):
    source = """
    import threading
    def talk():
        while True:
            print("x" * 100)
    def f(x):
        threading.Thread(target=talk, daemon=True).start()
        return x
    """
    assert outcome(runner, source).kind in ("answer", "prints")


MEMORY = {
    "bytearray": ("def f(x):\n    return len(bytearray(10 * 2**30))\n", "MemoryError", ""),
    "numpy": (
        "import numpy as np\ndef f(x):\n    return np.ones(10 * 2**27)\n",
        "MemoryError",
        "Unable to alloc",
    ),
    "JAX": ("import jax.numpy as jnp\ndef f(x):\n    return jnp.ones(10 * 2**28)\n", "JaxRuntimeError", "RESOURCE_EXH"),
    "piecemeal": ("def f(x):\n    kept = []\n    while True:\n        kept.append(bytes(2**26))\n", "MemoryError", ""),
}


def test_memory_is_limited(runner):
    """The limit refuses 10 GiB of zeros, which would take no physical memory."""
    for name, (source, kind, says) in MEMORY.items():
        found = outcome(runner, source)
        assert found.kind == kind and says in found.text, (name, found)
    more = "def f(x):\n    return len(bytearray(2**29))\n"
    assert outcome(runner, more).kind == "answer"


# Each of these must fail.
PROCESSES = {
    "os.fork": "os.fork() or os._exit(0)",
    "subprocess": "subprocess.run(['true'], check=True)",
    "os.system": "os.system('true') == 0 or 1 / 0",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=print).start()",
    "os.posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "os.execv": "os.execv('/bin/true', ['true'])",
}
NETWORK = {
    "TCP": "socket.create_connection(('127.0.0.1', PORT), timeout=1)",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "urllib": "urllib.request.urlopen('http://127.0.0.1:%d' % PORT, timeout=1)",
    "a server": "socket.create_server(('127.0.0.1', 0))",
}
HIDDEN = {
    "open": "open(FILE).read()",
    "pathlib": "pathlib.Path(FILE).read_text()",
    "os.open": "os.read(os.open(FILE, os.O_RDONLY), 100)",
    "numpy": "bytes(numpy.fromfile(FILE, 'u1'))",
    "import": "sys.path.append(os.path.dirname(FILE)) or __import__('solution').SECRET",
    "linecache": "linecache.getlines(FILE) or 1 / 0",
    "relative": "os.chdir(os.path.dirname(FILE)) or open('solution.py').read()",
    "a link": "os.symlink(FILE, 'link') or open('link').read()",
    "a hard link": "os.link(FILE, 'link2') or open('link2').read()",
    "by the root": "open('/proc/self/root' + FILE).read()",
    "listdir": "os.listdir(os.path.dirname(FILE))[0]",
    "scandir": "list(os.scandir(os.path.dirname(FILE)))[0]",
    "glob": "glob.glob(os.path.dirname(FILE) + '/*')[0]",
    "the courses of anybatch": "open(COURSES + '/gradients/catalogue.toml').read()",
}
FILES = {
    "write": "open(OUTSIDE + '/new', 'w')",
    "append": "open(OUTSIDE + '/file', 'a')",
    "remove": "os.remove(OUTSIDE + '/file')",
    "rename": "os.rename(OUTSIDE + '/file', OUTSIDE + '/other')",
    "move away": "os.rename(OUTSIDE + '/file', 'file')",
    "truncate": "os.truncate(OUTSIDE + '/file', 0)",
    "a folder": "os.mkdir(OUTSIDE + '/new')",
    "rmtree": "shutil.rmtree(OUTSIDE)",
    "a large file": "open('large', 'wb').write(bytes(20 * 2**20)) == 20 * 2**20 or 1 / 0",
    "many open files": "[open(os.devnull) for _ in range(1000)]",
}

TRY = """
import glob, json, linecache, multiprocessing, numpy, os, pathlib, shutil, socket, struct, subprocess
import sys, urllib.request
{names}
home = os.getcwd()
def f(x):
    for name, attempt in {attempts!r}.items():
        os.chdir(home)
        try:
            found = "done", repr(eval(attempt))
        except Exception as error:
            found = type(error).__name__, str(error)
        print(json.dumps([name, *found]))
    return x
"""


def attempts(runner, tried, **names):
    """The outcome of each attempt: the name of an exception, or "done"; and its text."""
    lines = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    found = outcome(held(runner, shown_print_bytes=10**5), TRY.format(names=lines, attempts=tried))
    assert found.kind == "answer", found
    lines = [line for line in found.prints.splitlines() if line.startswith("[")]  # without warnings of JAX
    results = {name: (kind, text) for name, kind, text in map(json.loads, lines)}
    assert results.keys() == tried.keys()
    return results


@pytest.fixture
def listener():
    """Ports that no check may reach."""
    with socket.create_server(("127.0.0.1", 0)) as streams, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(streams.getsockname())
        for each in (streams, datagrams):
            each.setblocking(False)
        yield streams, datagrams


def refused(results, says=None):
    for name, (kind, text) in results.items():
        assert kind != "done", (name, text)
        assert says is None or says in text, (name, kind, text)


def test_what_is_refused(runner, course, listener, tmp_path):
    streams, _ = listener
    (tmp_path / "file").write_text("mine")
    places = {
        "FILE": str(course / "solution.py"),
        "COURSES": str(pathlib.Path(submissions.__file__).parents[1] / "courses"),
    }
    tried = {**PROCESSES, **NETWORK, **HIDDEN, **FILES}
    results = attempts(runner, tried, OUTSIDE=str(tmp_path), PORT=streams.getsockname()[1], **places)
    refused(results)
    assert not any(SECRET in text for _, text in results.values())
    for port in listener:
        with pytest.raises(BlockingIOError):
            port.accept() if port is streams else port.recv(10)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"
    said = {
        "A check may start no other process: ": ("os.fork", "subprocess", "os.system", "os.posix_spawn", "os.execv"),
        "A check has no network: ": ("TCP", "UDP"),
        "belongs to the course: a check cannot read it": ("open", "pathlib", "a link", "by the root", "listdir"),
        "A check can write only in its own empty folder": ("write", "append", "remove", "a folder", "move away"),
    }
    for says, names in said.items():
        refused({name: results[name] for name in names}, says)


def test_nothing_of_the_grader_is_in_the_process(runner, monkeypatch):
    monkeypatch.setenv("ANYBATCH_TEST_SECRET", SECRET)
    source = """
    import gc, os, sys
    def f(x):
        frame, seen = sys._getframe(), []
        while frame:
            seen.append(repr(frame.f_locals))
            frame = frame.f_back
        seen += [str(each) for each in gc.get_objects() if type(each) is dict]
        print(len(seen), SECRET in str(seen))
        print(sorted(os.environ), sorted(int(each) for each in os.listdir("/proc/self/fd")))
        return x
    """
    found = outcome(runner, source.replace("SECRET", repr(SECRET[:8] + "' + '" + SECRET[8:]).replace('"', "'")))
    assert found.kind == "answer", found
    first, second = found.prints.splitlines()
    assert first.endswith("False"), first
    assert "ANYBATCH_TEST_SECRET" not in second and "XLA_FLAGS" in second


def test_files_in_the_empty_folder(runner):
    source = """
    import os, pathlib, shutil, tempfile
    def f(x):
        assert os.getcwd() == os.environ["HOME"] == tempfile.gettempdir() and os.listdir() == []
        os.makedirs("a/b/c")
        pathlib.Path("a/b/c/d").write_text("text")
        os.rename("a/b/c/d", "e")
        os.symlink("/", "root")
        shutil.rmtree("a")
        for number in range(3000):
            open(f"file{number}", "w").close()
        return x
    """
    assert outcome(runner, source).kind == "answer"


def test_threads_by_the_thousand(runner):
    source = """
    import threading, time
    def f(x):
        for _ in range(5000):
            threading.Thread(target=time.sleep, args=(100,)).start()
    """
    found = outcome(runner, source)
    assert (found.kind, found.text) == ("RuntimeError", "can't start new thread")


def test_a_fork_server_that_is_killed_is_replaced(course):
    with Runner(hidden=[course]) as runner:
        runner.keep_warm([1])
        with runner.open("import time\ndef f(x):\n    time.sleep(100)\n", "exercise.py") as submission:
            assert "functions" in submission.loaded
            pids = [*children_of(runner), runner._fork_server.process.pid]
            folder = runner._fork_server.folder
            os.kill(runner._fork_server.process.pid, signal.SIGKILL)
            with pytest.raises(Ended, match="or ended another process"):
                submission.ask({"function": "f", "args": (1,), "want": ("value",), "compiled": False})
        assert gone(pids)
        assert outcome(runner, "def f(x):\n    return x\n").kind == "answer"
        assert not os.path.exists(folder) and runner._fork_server.folder != folder
        pids, folder = [runner._fork_server.process.pid, *children_of(runner)], runner._fork_server.folder
    assert gone(pids) and not os.path.exists(folder)
    with pytest.raises(AnybatchError, match="This Runner was closed"):
        runner.open("", "exercise.py")


def test_a_child_that_cannot_be_had(runner):
    folder = runner._fork_server.folder
    os.rename(folder, f"{folder}-away")
    try:
        with (
            runner.open("", "exercise.py") as submission,
            pytest.raises(AnybatchError, match=r"could not be started\. Its output:\n\[Errno 2\] No such file"),
        ):
            assert submission.loaded
    finally:
        os.rename(f"{folder}-away", folder)
    assert outcome(runner, "def f(x):\n    return x\n").kind == "answer"


GRADER = """
import pathlib, time
from anybatch.learn.runner.submissions import Runner
runner = Runner()
runner.keep_warm([2])
submission = runner.open("import time\\nprint(1)\\nwhile True:\\n    time.sleep(1)\\n", "exercise.py")
while not submission.prints:
    time.sleep(0.05)
pid = runner._fork_server.process.pid
children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
print(pid, children, runner._fork_server.folder, flush=True)
submission.loaded
"""


def test_nothing_outlives_the_grader():
    """Neither if it is killed, nor if it is interrupted without closing anything."""
    graders = {}
    try:
        for number in (signal.SIGKILL, signal.SIGINT):
            graders[number] = subprocess.Popen(
                [sys.executable, "-c", GRADER],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        for number, grader in graders.items():
            *pids, folder = grader.stdout.readline().split()
            assert all(map(is_running, pids)) and len(pids) == 3 and os.path.isdir(folder)
            os.kill(grader.pid, number)
            grader.wait(timeout=20)
            assert gone(pids)
            deadline = time.monotonic() + 5
            while os.path.exists(folder) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not os.path.exists(folder)
        assert "KeyboardInterrupt" in grader.stderr.read()
    finally:
        for grader in graders.values():
            grader.kill()
            grader.wait()
            grader.stdout.close()
            grader.stderr.close()


def test_what_the_doctor_finds(runner):
    found = {each.subject: each for each in submissions.examine(runner)}
    assert all(each.is_well for each in found.values())
    assert "guards against accidents, not against attackers" in found["isolation"].text
    assert found["memory"].text == "1.0 GiB beyond what JAX takes"
    assert found["network"].text == "no connection can be opened from Python; code in C could open a connection"
    assert {"wall clock", "computing time", "processes", "files", "the course"} < set(found)


def test_there_is_no_windows(monkeypatch):
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(NotAvailableError, match=r"anybatch learn on Windows .*\nRun it in WSL\."):
        Runner()


def test_the_line_of_a_trace():
    trace = """\
Thread 0x00007f1 (most recent call first):
  File "/x/\\xe9.py", line 1 in talk
Current thread 0x00007f2 (most recent call first):
  File "/lib/jax.py", line 7 in call
  File "/x/\\xe9.py", line 3 in f
  File "/x/\\xe9.py", line 2 in g
"""
    assert submissions.line_of(trace, "/x/\xe9.py", "a\nb\nc\n") == (3, "c")
    assert submissions.line_of(trace, "/x/\xe9.py", "a\nb\n") == (2, "b")
    assert submissions.line_of(trace, "/x/other.py", "a\nb\nc\n") is None
