"""Checkpoints: complete or not there, whatever happens to the process, the arrays or the disk."""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import processes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch
from anybatch.errors import InputError
from anybatch.training import checkpoint_folder
from anybatch.training.checkpoint_folder import CheckpointFolder
from anybatch.training.checkpoints import CheckpointError, Checkpoints

pytestmark = pytest.mark.every_jax


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",), (AxisType.Auto,))


def noise(step, size=1000):
    """What does not compress, and is known again from its step."""
    return np.random.default_rng(step).standard_normal(size).astype(np.float32)


def leftovers(folder):
    return [path.name for path in folder.iterdir() if not path.name.isdecimal() and not path.name.startswith(".")]


def same(restored, saved):
    if jax.dtypes.issubdtype(saved.dtype, jax.dtypes.prng_key):
        assert restored.dtype == saved.dtype
        restored, saved = jax.random.key_data(restored), jax.random.key_data(saved)
    assert restored.shape == saved.shape and restored.dtype == saved.dtype
    assert np.asarray(restored).tobytes() == np.asarray(saved).tobytes()


def test_everything_comes_back_as_it_was(tmp_path):
    """Of any dtype, shape and name, bit by bit; with the record, and in a new object."""
    dtypes = "int8 uint32 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e5m2 int4".split()
    arrays = {dtype: jnp.asarray([[0, 1, 2]] * 2).astype(dtype) for dtype in dtypes}
    arrays |= {
        "params['a']/b.c": jnp.float32(0.1),
        "params['a']": jnp.asarray([True, False]),
        "..": jnp.asarray([jnp.nan, -0.0, jnp.inf]),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "old key": jax.random.PRNGKey(5),
        "numpy": np.arange(3.0),
        "big endian": np.arange(3, dtype=">i4"),
        "numpy empty": np.zeros((2, 0)),
        "weak": jnp.asarray(1.0),
        "committed": jax.device_put(jnp.ones(2), jax.devices()[3]),
    }
    record = {"position": {"epoch": 1, "name": "ä"}, "loss": 0.1}
    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(7, arrays, record)
        record["position"]["epoch"] = 2  # it was read when it was saved
        checkpoints.wait()
        assert checkpoints.latest() == 7
    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        step, restored, found = checkpoints.restore(arrays)
    assert (step, found) == (7, {"position": {"epoch": 1, "name": "ä"}, "loss": 0.1})
    assert list(restored) == list(arrays)
    for name, array in arrays.items():
        same(restored[name], array if name != "big endian" else array.astype("i4"))
        assert isinstance(restored[name], jax.Array) == isinstance(array, jax.Array)
        if isinstance(array, jax.Array):  # so that a program compiled for the one takes the other
            assert restored[name].sharding == array.sharding
            assert restored[name].committed == array.committed
            assert getattr(restored[name], "weak_type", None) == getattr(array, "weak_type", None)


def test_numbers_are_arrays_without_axes(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"int": 3, "float": 0.1, "bool": True, "numpy": np.float32(2)}, {})
        _, restored, _ = checkpoints.restore({"int": 0, "float": 0.0, "bool": False, "numpy": np.float32(0)})
    assert [(value.shape, value.dtype.name, value.item()) for value in restored.values()] == [
        ((), "int64", 3),
        ((), "float64", 0.1),
        ((), "bool", True),
        ((), "float32", 2.0),
    ]


def test_arrays_without_elements_alone(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"empty": jnp.zeros((0, 2))}, {"a": 1})
        _, restored, record = checkpoints.restore({"empty": jnp.zeros((0, 2))})
    assert restored["empty"].shape == (0, 2) and record == {"a": 1}


def test_saved_with_one_sharding_and_restored_to_another(tmp_path, mesh):
    x, key = np.arange(64.0, dtype=np.float32).reshape(8, 8), jax.random.split(jax.random.key(0), 8)
    rows, columns, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P(None, "data"), P()))
    with Checkpoints(tmp_path) as checkpoints:
        arrays = {"x": jax.device_put(x, rows), "keys": jax.device_put(key, rows), "none": jax.device_put(x[:0], whole)}
        checkpoints.save(1, arrays, {})
        for sharding in (rows, columns, whole, jax.sharding.SingleDeviceSharding(jax.devices()[5])):
            like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), "keys": key, "none": x[:0]}
            _, restored, _ = checkpoints.restore(like)
            assert restored["x"].sharding == sharding
            same(restored["x"], x)
            same(restored["keys"], key)
        _, restored, _ = checkpoints.restore(arrays)
        assert restored["keys"].sharding == arrays["keys"].sharding
        assert restored["none"].sharding == arrays["none"].sharding
        checkpoints.save(2, {"x": x}, {})  # and from one device to eight
        _, restored, _ = checkpoints.restore({"x": jax.device_put(jnp.zeros((8, 8)), rows)})
        assert restored["x"].sharding == rows
        same(restored["x"], x)


@pytest.mark.parametrize("spread", [False, True])
def test_arrays_may_be_donated_at_once(tmp_path, mesh, spread):
    """What is restored is what was saved, though the next call overwrites the very memory: the control sees it."""
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    sharding = NamedSharding(mesh, P("data")) if spread else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x, size = jax.device_put(jnp.zeros(400_000), sharding), 400_000 // (8 if spread else 1)
    with Checkpoints(tmp_path, keep=20) as checkpoints:
        for step in range(8):
            x.block_until_ready()
            address = x.addressable_shards[0].data.unsafe_buffer_pointer()
            memory = np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
            checkpoints.save(step, {"x": x}, {})
            before, x = x, donating(x)
            x.block_until_ready()
            assert before.is_deleted() and np.all(memory == step + 1)  # the control: overwritten in place
            for _ in range(3):
                x = donating(x)
            x = x - 3
        checkpoints.wait()
        for step in range(8):
            _, restored, _ = checkpoints.restore({"x": x}, step)
            assert np.all(np.asarray(restored["x"]) == step)


def test_numpy_arrays_may_be_overwritten_at_once(tmp_path):
    x = np.zeros(400_000)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"x": x}, {})
        x[:] = 1
        assert not np.any(checkpoints.restore({"x": x})[1]["x"])


def test_the_newest_are_kept_and_none_goes_before_the_next_is_complete(tmp_path, monkeypatch):
    seen, complete = [], threading.Event()
    seal = CheckpointFolder.seal

    def held(folder):
        complete.wait(10)
        seal(folder)

    monkeypatch.setattr(CheckpointFolder, "seal", held)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 3, 5, 8):
            complete.clear()
            checkpoints.save(step, {"x": noise(step)}, {})
            seen.append((checkpoints.latest(), checkpoints._files.steps()))  # while it is being written
            complete.set()
            checkpoints.wait()
    assert seen == [(None, []), (2, [2]), (3, [2, 3]), (5, [3, 5])]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["5", "8"]


def test_a_step_that_is_there_is_replaced_and_stays_until_then(tmp_path, monkeypatch):
    seal, fails = CheckpointFolder.seal, []

    def maybe(folder):
        seal(folder)
        if fails:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(CheckpointFolder, "seal", maybe)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, {"x": noise(1)}, {"run": 1})
        checkpoints.save(3, {"x": noise(2)}, {"run": 2})
        _, restored, record = checkpoints.restore({"x": noise(0)})
        assert record == {"run": 2}
        same(restored["x"], noise(2))
        fails.append(True)
        checkpoints.save(3, {"x": noise(3)}, {"run": 3})
        with pytest.raises(CheckpointError, match=r"step 3 could not be written .*: .*Input/output error"):
            checkpoints.wait()
        assert checkpoints.restore({"x": noise(0)})[2] == {"run": 2}
    assert leftovers(tmp_path) == []


def test_a_writer_killed_while_it_replaces_one(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": noise(step)}, {})
    (tmp_path / "2").rename(tmp_path / "2.replaced")
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    shutil.copytree(tmp_path / "1", tmp_path / "0.removed")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert leftovers(tmp_path) == []
        assert checkpoints.latest() == 2
        same(checkpoints.restore({"x": noise(0)})[1]["x"], noise(2))


KILLED = """\
import os, signal, sys, time
import numpy as np
import orbax.checkpoint
from pathlib import Path
from anybatch.training.checkpoints import Checkpoints
from training.test_checkpoints import noise

def write(folder, safe):
    with Checkpoints(folder, keep=2) as checkpoints:
        step = checkpoints.latest() or 0
        while True:
            step += 1
            checkpoints.save(step, {"x": noise(step, 700_000), "n": step}, {"step": step})
            if safe.exists() or step > 1:
                safe.write_text(str(step - 1))  # the save waited for the one before

for line in sys.stdin:
    child = os.fork()  # before JAX has threads
    if child == 0:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    time.sleep(float(line))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def ours():
    """An environment where a program finds what is here."""
    here = Path(__file__).parents[1]
    return os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "JAX_PLATFORMS": "cpu"}


def kill_writers(folder, safe, delays):
    """Kills writers at work; yields after each."""
    starter = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), str(safe)],
        env=ours(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with contextlib.closing(starter.stdin), contextlib.closing(starter.stdout):
        for delay in delays:
            starter.stdin.write(f"{delay}\n")
            starter.stdin.flush()
            assert starter.stdout.readline() == "killed\n"
            yield
    starter.wait(10)


def survives(folder, safe, times, seed):
    delays = np.random.default_rng(seed).uniform(0.5, 1.0, times)
    found = []
    for _ in kill_writers(folder, safe, delays):
        found += leftovers(folder) if folder.exists() else []
        with Checkpoints(folder, keep=2) as checkpoints:
            assert leftovers(folder) == []
            newest = checkpoints.latest()
            assert (newest or 0) >= (int(safe.read_text() or 0) if safe.exists() else 0)
            for step in checkpoints._files.steps():
                _, restored, record = checkpoints.restore({"x": noise(0, 700_000), "n": 0}, step)
                same(restored["x"], noise(step, 700_000))
                assert restored["n"] == step and record == {"step": step}
    assert newest > times and any("tmp" in name for name in found)  # the control: some were killed in the middle


@pytest.mark.full
def test_a_writer_may_be_killed_at_any_moment(tmp_path):
    survives(tmp_path / "folder", tmp_path / "safe", times=5, seed=int(time.time()))


@pytest.mark.slow
def test_a_writer_may_be_killed_at_any_moment_many_times(tmp_path):
    survives(tmp_path / "folder", tmp_path / "safe", times=40, seed=int(time.time()))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB, and how to make it read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full(small_disk, monkeypatch):
    """Seen before anything is written; or, if it fills up meanwhile, when that is; and the run can go on after it."""
    large = noise(2, 2_000_000)
    with Checkpoints(small_disk / "run") as checkpoints:
        checkpoints.save(1, {"x": noise(1)}, {})
        checkpoints.wait()
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(2, {"x": large}, {})
        assert str(caught.value).splitlines()[0].endswith(": the disk has too little space for it.")
        needs = r"\nIt needs about 7\.9 MiB, and \d\.\d MiB are free\. The one of step 1 is complete and good\.\n"
        assert re.search(needs, str(caught.value))
        assert caught.value.last_good == 1 and caught.value.step == 2 and isinstance(caught.value, OSError)
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointFolder, "free_bytes", lambda folder: 10**9)
            checkpoints.save(2, {"x": large}, {})
            with pytest.raises(CheckpointError, match=r"step 2 could not be written .*: the disk is full"):
                checkpoints.wait()
        assert leftovers(small_disk / "run") == []
        assert checkpoints._files.free_bytes() > 3.8 * 2**20
        assert checkpoints.latest() == 1
        same(checkpoints.restore({"x": noise(0)})[1]["x"], noise(1))
        checkpoints.save(3, {"x": noise(3)}, {})
        same(checkpoints.restore({"x": noise(0)})[1]["x"], noise(3))


def test_a_disk_that_is_read_only(small_disk):
    with Checkpoints(small_disk / "run") as checkpoints:
        checkpoints.save(1, {"x": noise(1)}, {})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(InputError, match=r"one that can be written to, got .*run \(Read-only file system\)"):
        Checkpoints(small_disk / "run")


@pytest.mark.parametrize("call", ["save", "wait", "restore", "close"])
def test_what_fails_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch, call):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "seal", full)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": noise(1)}, {})
    later = {
        "save": lambda: checkpoints.save(2, {"x": noise(2)}, {}),
        "wait": checkpoints.wait,
        "restore": lambda: checkpoints.restore({"x": noise(0)}),
        "close": checkpoints.close,
    }
    with pytest.raises(CheckpointError, match=r"step 1 .*the disk is full.*\n.*no other") as caught:
        later[call]()
    assert caught.value.state is None and caught.value.last_good is None
    monkeypatch.undo()
    checkpoints.close()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_folder_that_goes_while_it_is_in_use(tmp_path, instead):
    """It is made anew, or an error says at once that it cannot be; no thread is left waiting for it."""
    folder, before = tmp_path / "run", set(threading.enumerate())
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"x": noise(1)}, {})
        checkpoints.wait()
        folder.rename(tmp_path / "elsewhere")
        assert checkpoints.latest() is None
        if instead == "nothing":
            checkpoints.save(2, {"x": noise(2)}, {})
            same(checkpoints.restore({"x": noise(0)})[1]["x"], noise(2))
        else:
            folder.touch()
            with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*\n.* There is no other"):
                checkpoints.save(2, {"x": noise(2)}, {})
    if instead == "nothing":
        Checkpoints(folder).close()  # and is ours as before
    end = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in names if not name.startswith(("ThreadPool", "asyncio", "metadata"))], names


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_disk(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "seal", full)
    with pytest.raises(ZeroDivisionError) as caught, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": noise(1)}, {})
        raise ZeroDivisionError
    assert "step 1 could not be written" in caught.value.__notes__[0]


def test_a_folder_that_cannot_be_one(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").mkdir()
    for folder, reason in [("file", "File exists"), ("file/folder", "Not a directory")]:
        with pytest.raises(InputError, match=rf"must be one that can be written to, got .*{folder} \({reason}\)"):
            Checkpoints(tmp_path / folder)
    with pytest.raises(
        InputError, match=r"must be new, empty, or one of checkpoints .*home with letters\.\n.*'.*home/"
    ):
        Checkpoints(tmp_path / "home")
    assert os.listdir(tmp_path / "home") == ["letters"]

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_folder.tempfile, "TemporaryFile", denied)
    with pytest.raises(InputError, match=r"\(Permission denied\)"):
        Checkpoints(tmp_path / "new")


def test_a_log_may_lie_in_the_folder(tmp_path):
    (tmp_path / "run.csv").write_text("step\n")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": 1}, {})
    assert (tmp_path / "run.csv").read_text() == "step\n"


def test_one_writer_only(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "_PATIENCE", 0.1)
    holder = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(1, flush=True)"
    Checkpoints(tmp_path).close()
    with subprocess.Popen(
        [sys.executable, "-c", holder + "; input()", str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdout.readline()
        with pytest.raises(InputError, match=r"must have one writer only, got .*, which another process has open"):
            Checkpoints(tmp_path)
        other.stdin.close()
    Checkpoints(tmp_path).close()  # the control


def test_a_second_writer_that_is_refused_lets_no_third_one_in(tmp_path):
    """A lock of the system is the process's: to open the file and close it again would let go of it."""
    attempt = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", attempt, str(tmp_path / ".lock")]
    with Checkpoints(tmp_path):
        with pytest.raises(InputError, match="which this process has open already"):
            Checkpoints(tmp_path)
        assert subprocess.run(command, capture_output=True).returncode == 1
    assert subprocess.run(command, capture_output=True).returncode == 0  # the control


def test_a_checkpoint_of_another_model(tmp_path):
    saved = {"same": jnp.zeros(3), "shape": jnp.zeros((3, 2)), "dtype": jnp.zeros(3), "old": jax.random.key(0)}
    wanted = {"same": jnp.zeros(3), "shape": jnp.zeros((2, 3)), "dtype": jnp.zeros(3, jnp.bfloat16), "new": 1}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, saved, {})
        checkpoints.wait()
        shutil.rmtree(tmp_path / "4" / "arrays")  # it is not even looked at
        with pytest.raises(InputError) as caught:
            checkpoints.restore(wanted)
        lines = str(caught.value).splitlines()
        assert lines[1:5] == [
            "    shape: float32[3,2] in the checkpoint, float32[2,3] in the state",
            "    dtype: float32[3] in the checkpoint, bfloat16[3] in the state",
            "    new: int64[], which the checkpoint does not have",
            "    old: key<fry>[] in the checkpoint, and not in the state",
        ]
        assert lines[0].startswith("The checkpoint must have the same arrays") and 'checkpoints="run2"' in lines[5]
        with pytest.raises(InputError, match=r"and 92 more\n") as caught:
            checkpoints.restore(saved | {f"layer {number}": 0 for number in range(101)})
        assert len(str(caught.value).splitlines()) == 12


def cut_short(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("damage, says", [(cut_short, "bytes, and had"), (change_a_bit, "changed"), (Path.unlink, "")])
def test_a_checkpoint_that_the_disk_has_damaged(tmp_path, damage, says):
    """Whatever file of it: an error that names it, and the one before; the values, if the file is of no matter."""
    arrays = {"x": noise(1, 50_000), **{f"small {number}": noise(number, 3) for number in range(3)}}
    with Checkpoints(tmp_path / "good") as checkpoints:
        checkpoints.save(1, arrays, {})
        checkpoints.save(2, arrays, {})
    files = [path for path in (tmp_path / "good" / "2").rglob("*") if path.is_file() and path.stat().st_size]
    errors = []
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        damage(folder / file.relative_to(tmp_path / "good"))
        with Checkpoints(folder) as checkpoints:
            try:
                _, restored, _ = checkpoints.restore(arrays)
            except CheckpointError as error:
                errors.append(str(error))
                assert f"The checkpoint of step 2 in {folder} is damaged: " in str(error)
                assert f"Delete {folder / '2'} to continue without it; the newest other one is of step 1." in str(error)
                restored = checkpoints.restore(arrays, 1)[1]
            for name, array in arrays.items():
                same(restored[name], array)
    assert len(errors) >= len(files) - 3 and sum(says in error for error in errors) >= 3
    with Checkpoints(tmp_path / "good") as checkpoints:  # the control
        same(checkpoints.restore(arrays)[1]["x"], arrays["x"])


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "copied"])
def test_a_checkpoint_under_the_name_of_another_step(tmp_path, moves):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": noise(step)}, {})
    (shutil.move if moves else shutil.copytree)(tmp_path / "2", tmp_path / "50")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore({"x": noise(0)})
        way_out = f"Move it back: mv {tmp_path}/50 {tmp_path}/2" if moves else f"Delete the copy: rm -r {tmp_path}/50"
        assert str(caught.value) == (
            f"The checkpoint {tmp_path}/50 must be of step 50, and is of step 2: it was moved or copied to this name.\n"
            f"{way_out}"
        )
        assert (caught.value.step, caught.value.last_good) == (50, 1 if moves else 2)
        step, restored, _ = checkpoints.restore({"x": noise(0)}, 1)  # the control
        same(restored["x"], noise(1))
    subprocess.run(way_out.partition(": ")[2], shell=True, check=True)
    with Checkpoints(tmp_path) as checkpoints:
        step, restored, _ = checkpoints.restore({"x": noise(0)})
    assert step == 2
    same(restored["x"], noise(2))


def as_written_by_0_7_0(checkpoint):
    """Takes out of a checkpoint what that version did not write, and seals it again."""
    record, seal = checkpoint / "record" / "metadata", checkpoint / "record" / "files.json"
    content = json.loads(record.read_text())
    content = {name: content[name] for name in ("anybatch", "arrays", "record")}
    record.write_text(json.dumps(content))
    sums = json.loads(seal.read_text())
    sums["record/metadata"] = [record.stat().st_size, zlib.crc32(record.read_bytes())]
    seal.write_text(json.dumps(sums))


def test_a_checkpoint_of_0_7_0_does_not_tell_its_step_and_is_taken_at_its_name(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, {"x": noise(2)}, {"a": 1})
    as_written_by_0_7_0(tmp_path / "2")
    shutil.move(tmp_path / "2", tmp_path / "3")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.versions(3) == {}
        step, restored, record = checkpoints.restore({"x": noise(0)})
    assert (step, record) == (3, {"a": 1})
    same(restored["x"], noise(2))


def test_a_checkpoint_tells_the_versions_that_it_was_saved_with(tmp_path):
    import orbax.checkpoint

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, {"x": 1}, {})
        checkpoints.wait()
        expected = {"anybatch": anybatch.__version__, "jax": jax.__version__, "orbax": orbax.checkpoint.__version__}
        assert checkpoints.versions(2) == expected


def test_to_open_a_folder_deletes_no_checkpoint(tmp_path):
    """A run with another model, and a smaller keep, is refused after it has opened the folder."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": step}, {})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(InputError, match="same arrays"):
            checkpoints.restore({"y": 0})
        assert checkpoints._files.steps() == [1, 2, 3]
        checkpoints.save(4, {"x": 4}, {})
        checkpoints.wait()
        assert checkpoints._files.steps() == [4]  # the control: a save keeps the newest one


def test_what_has_the_name_of_a_checkpoint_and_is_none_is_kept(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": 1}, {})
    for number in (1, 2):
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "notes.txt").write_text(f"mine {number}")
        (tmp_path / "best.replaced").mkdir(exist_ok=True)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, {"x": number}, {})
            checkpoints.wait()
            assert checkpoints.restore({"x": 0})[:2] == (2, {"x": number})
        shutil.rmtree(tmp_path / "2")
    assert [(path / "notes.txt").read_text() for path in sorted(tmp_path.glob("2.kept*"))] == ["mine 1", "mine 2"]
    assert (tmp_path / "best.replaced").is_dir()


def test_a_step_before_the_newest_would_be_lost(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 5):
            checkpoints.save(step, {"x": step}, {})
        with pytest.raises(InputError, match=r"got step=3 after 5 in .*\n.*or delete the later ones"):
            checkpoints.save(3, {"x": 3}, {})
        shutil.rmtree(tmp_path / "5")
        assert checkpoints._files.steps() == [1, 2]
        checkpoints.save(3, {"x": 3}, {})
        assert checkpoints.restore({"x": 0})[0] == 3
        for step in (1, 2, 3):
            shutil.rmtree(tmp_path / str(step))
        assert checkpoints.latest() is None


def test_input_that_cannot_be(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": 1}, {})
        checkpoints.wait()
        for arguments, message in [
            ((-1, {"x": 1}, {}), "step must be a whole number of at least 0, got step=-1"),
            ((1.5, {"x": 1}, {}), "got step=1.5"),
            ((2, {}, {}), "must be a dictionary of at least one, got arrays={}"),
            ((2, [1], {}), "must be a dictionary of at least one, got a list"),
            ((2, {"x": "text"}, {}), "of a dtype that can be stored, got x: str"),
            ((2, {"x": np.array(["text"])}, {}), "got x: ndarray of dtype <U4"),
            ((2, {"x": jnp.zeros(2, jnp.uint4)}, {}), r"of dtype uint4.\n.*array.astype\(jnp.uint8\)"),
        ]:
            with pytest.raises(InputError, match=message):
                checkpoints.save(*arguments)
    with pytest.raises(InputError, match="keep must be a whole number of at least 1, got keep=0"):
        Checkpoints(tmp_path, keep=0)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(InputError, match=r'Checkpoints need Orbax.*\n.*pip install "\.\[train\]"'):
        Checkpoints(tmp_path)


def test_nothing_is_printed(tmp_path, monkeypatch, capfd):
    def full(folder):
        raise OSError(28, "No space left on device")

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"x": noise(1)}, {})
            checkpoints.restore({"x": noise(0)})
        monkeypatch.setattr(CheckpointFolder, "seal", full)
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError):
            checkpoints.save(2, {"x": noise(1)}, {})
            checkpoints.wait()
        assert capfd.readouterr() == ("", "")
        assert not [each for each in logger.filters if "Silence" in type(each).__name__]
    finally:
        logger.setLevel(level)


def test_where_an_event_loop_runs(tmp_path):
    """As in a notebook."""

    async def cell():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"x": noise(1)}, {})
            same(checkpoints.restore({"x": noise(0)})[1]["x"], noise(1))

    asyncio.run(cell())


UNCLOSED = """\
import sys
from anybatch.training.checkpoints import Checkpoints
from training.test_checkpoints import noise
Checkpoints(sys.argv[1]).save(1, {"x": noise(1, 1_000_000)}, {})
raise ZeroDivisionError
"""


def test_a_program_that_ends_without_closing(tmp_path):
    """Its last save is complete; with Python 3.12, where it cannot be, it says so."""
    ended = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(tmp_path)], env=ours(), capture_output=True, text=True, timeout=60
    )
    _, _, after = ended.stderr.partition("\nZeroDivisionError\n")
    with Checkpoints(tmp_path) as checkpoints:
        if checkpoints.latest() is None:
            assert sys.version_info[:2] == (3, 12)
            assert "The checkpoint of step 1 could not be written" in after and "checkpoints.close()" in after
        else:
            assert after == ""
            same(checkpoints.restore({"x": noise(0, 1_000_000)})[1]["x"], noise(1, 1_000_000))


def test_the_folder_is_one_of_orbax(tmp_path):
    """Whoever has Orbax can read it without us."""
    import orbax.checkpoint as ocp

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": noise(3)}, {"a": 1})
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 3
        way = ocp.args.PyTreeRestore(item={"x": 0}, restore_args={"x": ocp.RestoreArgs(restore_type=np.ndarray)})
        restored = manager.restore(3, args=ocp.args.Composite(arrays=way, record=ocp.args.JsonRestore()))
    same(restored["arrays"]["x"], noise(3))
    assert restored["record"]["record"] == {"a": 1}


@pytest.mark.full
def test_several_processes(tmp_path):
    body = f"""\
    distributed.initialize()
    from jax.sharding import NamedSharding, PartitionSpec as P
    from anybatch.training.checkpoints import Checkpoints
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    spread = jax.make_array_from_callback(x.shape, rows, lambda index: x[index])
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpoints({str(tmp_path / "folder")!r}, keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, {{"x": spread, "step": np.int32(step), "key": jax.random.key(step)}}, {{"at": step}})
            spread = donating(spread)
        checkpoints.wait()
        assert checkpoints.latest() == 3
        for sharding in (rows, whole):
            like = {{"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}}
            like |= {{"step": np.int32(0), "key": jax.random.key(0)}}
            step, restored, record = checkpoints.restore(like)
            assert step == 3 and record == {{"at": 3}} and restored["step"] == 3
            for shard in restored["x"].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), x[shard.index] + 3)
            assert restored["x"].sharding == sharding
    print("good")
    """
    ended = processes.run(body, tmp_path, count=2, devices=2)
    assert [(each.status, "good" in each.output) for each in ended] == [(0, True)] * 2, ended
    assert json.loads((tmp_path / "folder" / "2" / "record" / "metadata").read_text())["record"] == {"at": 2}
