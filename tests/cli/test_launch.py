"""`anybatch launch`, as a user runs it: output, exit status, and nothing left behind."""

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from cases.processes import end

from anybatch.cli import launch
from anybatch.errors import InputError

# A script that waits, and prints its process id so that a test can see whether it still runs.
WAIT = """
import os, sys, time
print("waits as", os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def command(*arguments):
    return [sys.executable, "-W", "error", "-m", "anybatch", "launch", *map(str, arguments)]


def run(*arguments, **options):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, **options)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=5.0):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def test_the_example_of_the_help_works(tmp_path):
    text = run("--help").stdout
    example = textwrap.dedent(text[text.index("  # hello.py") : text.index("      anybatch launch")])
    (tmp_path / "hello.py").write_text(example)
    words = re.search(r"anybatch launch (.+)", text[text.index("      anybatch launch") :])[1].split()
    result = run(*words, cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert result.returncode == 0, result.stderr
    for index in (0, 1):
        assert f"[{index}] process {index} of 2, which met at 127.0.0.1:" in result.stdout
        assert f"[{index}] 4 of 8 devices\n" in result.stdout


def test_output_arguments_and_variables(script):
    path = script(
        """
        import os, sys
        print(sys.argv[1:], os.environ["ANYBATCH_PROCESS_ID"], os.environ["JAX_NUM_CPU_DEVICES"])
        print("to the other stream", file=sys.stderr)
        sys.stdout.write("no end of line")
        """
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:1"}
    arguments = ("--processes", 3, "--devices-per-process", 2, path, "--processes", "-x")
    result = run(*arguments, env=environment)
    assert result.returncode == 0, result.stderr
    expected = [f"[{i}] ['--processes', '-x'] {i} 2" for i in range(3)] + [f"[{i}] no end of line" for i in range(3)]
    assert sorted(result.stdout.splitlines()) == sorted(expected)
    assert sorted(result.stderr.splitlines()) == [f"[{i}] to the other stream" for i in range(3)]


@pytest.mark.parametrize(
    "how, status, said",
    [("sys.exit(7)", 7, "ended with status 7"), ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_when_one_process_fails_the_others_are_ended(script, how, status, said):
    path = script(
        f"""
        import os, sys, time
        if os.environ["ANYBATCH_PROCESS_ID"] == "1":
            time.sleep(0.5)
            {how}
        {textwrap.indent(WAIT, " " * 8).strip()}
        """
    )
    started = time.monotonic()
    result = run("--processes", 3, path)
    assert result.returncode == status
    assert f"anybatch launch: process 1 {said}; ending the others" in result.stderr
    waiting = re.findall(r"waits as (\d+)", result.stdout)
    assert len(waiting) == 2 and gone(waiting, 0)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_processes_end_with_the_launcher(script, number, status):
    if number == signal.SIGKILL and not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a process that its parent was killed")
    launcher = subprocess.Popen(
        command(script(WAIT)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        waiting = [launcher.stdout.readline().rsplit(" ", 1)[1].strip() for _ in range(2)]
        assert all(map(is_running, waiting))
        os.kill(launcher.pid, number)
        assert launcher.wait(timeout=20) == status
        assert gone(waiting)
    finally:
        end(launcher)
        launcher.stdout.close()


@pytest.mark.full
def test_processes_that_ignore_sigterm_are_killed(script):
    path = script(
        f"""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["ANYBATCH_PROCESS_ID"] == "1":
            time.sleep(0.5)
            sys.exit(7)
        {textwrap.indent(WAIT, " " * 8).strip()}
        """
    )
    started = time.monotonic()
    result = run(path)
    assert result.returncode == 7
    assert gone(re.findall(r"waits as (\d+)", result.stdout), 0)
    assert time.monotonic() - started < 20


@pytest.mark.full
def test_a_closed_stdout_ends_the_processes(script):
    path = script("import time\nfor turn in range(600): print(turn, flush=True); time.sleep(0.1)")
    launcher = subprocess.Popen(command(path), stdout=subprocess.PIPE, start_new_session=True)
    try:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(timeout=20) == 141
    finally:
        end(launcher)


def test_a_missing_script_is_refused():
    result = run("--processes", 4, "nowhere.py")
    assert result.returncode == 2
    assert result.stderr.startswith("The script must be a file, got 'nowhere.py'.\nanybatch launch --processes 4")


@pytest.fixture
def starts_nothing(monkeypatch):
    def start(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "_start", start)
    monkeypatch.setattr(launch, "visible_gpus", lambda _: [])


@pytest.mark.usefixtures("starts_nothing")
def test_too_many_processes_are_refused_before_anything_starts(script, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(InputError) as caught:
        launch.launch(script("print(1)"), processes=17)
    assert str(caught.value) == (
        "processes must be at most 16: each process loads JAX, and this machine has 2 CPUs, got processes=17.\n"
        "Start fewer. With --devices-per-process, one process has several simulated devices."
    )


@pytest.mark.parametrize("option", ["--processes", "--devices-per-process"])
@pytest.mark.parametrize("number", [0, -3, 1.5])
def test_the_command_refuses_other_numbers(script, option, number):
    result = run(option, number, script("print('started')"))
    assert result.returncode == 2 and result.stdout == "" and option in result.stderr


@pytest.mark.usefixtures("starts_nothing")
@pytest.mark.parametrize("cpus, processes", [(2, 16), (64, 256)])
def test_allowed_numbers_of_processes_are_started(script, monkeypatch, cpus, processes):
    """The control: these are not refused; the first start is reached."""
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    with pytest.raises(AssertionError, match="a process was started"):
        launch.launch(script("print(1)"), processes=processes)


def test_the_command_refuses_too_many(script):
    result = run("--processes", 100_000, script("print('started')"), env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert result.returncode == 2 and result.stdout == ""
    assert "must be at most" in result.stderr and "100000" in result.stderr


def test_if_a_start_fails_the_processes_already_started_are_ended(script, monkeypatch, tmp_path):
    started = []

    def start(command, environment):
        if len(started) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        )
        return started[-1]

    monkeypatch.setattr(launch, "_start", start)
    monkeypatch.setattr(launch, "visible_gpus", lambda _: [])
    with pytest.raises(InputError) as caught:
        launch.launch(script(WAIT), processes=4)
    for process in started:
        process.stdout.close()
        process.stderr.close()
        assert process.poll() is not None
    assert str(caught.value) == (
        "The operating system must be able to start all processes, got process 2 of 4 (Too many open files).\n"
        "Start fewer, e.g. anybatch launch --processes 2 ..., or raise the system's limits: ulimit -n, ulimit -u."
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "options, outcome",
    [
        ("processes=2", ["[0] 0,3", "[1] 5,6"]),
        ("processes=2, devices_per_process=1", ["[0] 0", "[1] 3"]),
        ("processes=6", "got 5 GPUs for 6 processes."),
        ("processes=2, devices_per_process=3", "got 5 GPUs for 2 processes with 3 devices each."),
    ],
)
def test_processes_share_the_gpus(script, options, outcome):
    path = script("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    gpus = ["0", "3", "5", "6", "7"]
    program = (
        f"from anybatch.cli import launch; launch.visible_gpus = lambda _: {gpus}; launch.launch({path!r}, {options})"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if isinstance(outcome, str):
        assert outcome in result.stderr
        assert "JAX_PLATFORMS=cpu anybatch launch" in result.stderr
    else:
        assert sorted(result.stdout.splitlines()) == outcome, result.stderr


class Plugin:
    name = "xla_cuda13"


@pytest.mark.parametrize(
    "environment, gpus",
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "JAX_PLATFORMS": "cpu"}, []),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "JAX_PLATFORMS": "cuda,cpu"}, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_the_gpus_that_jax_would_use(monkeypatch, environment, gpus):
    monkeypatch.setattr(launch.importlib.metadata, "entry_points", lambda group: [Plugin])
    assert launch.visible_gpus(environment) == gpus
    monkeypatch.setattr(launch.importlib.metadata, "entry_points", lambda group: [])
    assert launch.visible_gpus(environment) == []
