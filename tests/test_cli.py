"""The command line, as a user runs it."""

import re
import subprocess
import sys

import anybatch


def run(*arguments):
    command = [sys.executable, "-W", "error", "-m", "anybatch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_version():
    assert run("--version").stdout == f"anybatch {anybatch.__version__}\n"


def test_help_names_the_commands():
    result = run()
    assert "demo" in result.stdout + result.stderr


def test_demo_is_readable_when_piped():
    result = run("demo", "--examples", "600", "--memory", "6")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout  # no colours, no cursor movements
    for recipe in ("equivalent_two_ways", "microbatched_grads", "shard_map_vs_vmap", "grad_accumulation_step"):
        assert recipe in result.stdout
    rows = re.findall(r"│\s+(full|\d+) │\s+([\d.]+) MiB │\s+(yes|no) │\s+\d+ ms │\s+(\S+) │", result.stdout)
    assert [size for size, *_ in rows] == ["full", "256", "64"]
    assert all(float(difference) < 1e-5 for *_, difference in rows)
    temporaries = [float(mebibytes) for _, mebibytes, *_ in rows]
    assert temporaries == sorted(temporaries, reverse=True)
    assert [fits == "yes" for *_, fits, _ in rows] == [mebibytes <= 6 for mebibytes in temporaries]
    assert "anybatch.value_and_grad(loss, microbatch_size=64)(params, batch)" in result.stdout
    for kind in (
        "mean over 64 examples",
        "ratio of sums",
        "square root of a mean over 64 examples",
        "couples examples",
    ):
        assert kind in result.stdout


def test_demo_refuses_a_batch_of_nothing():
    result = run("demo", "--examples", "0")
    assert result.returncode == 2
    assert "--examples" in result.stderr


def test_missing_packages_are_named():
    program = "import sys; sys.modules['typer'] = None; from anybatch.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert 'pip install "anybatch[cli]"' in result.stderr
