"""Many processes: they find each other, hold one batch together, and none waits for ever for another."""

import re
import sys

import jax
import numpy as np
import pytest
from cases.processes import run
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from anybatch import distributed
from anybatch.cli import launch
from anybatch.errors import InputError

# What eight devices in two processes are checked for, in one start. Every process must come to every line.
TOGETHER = """
found = distributed.initialize(timeout=40)
print("first", found)
assert distributed.initialize(num_processes=2) is found, "a second call returns what the first did"


def message(fun, *arguments, **options):
    try:
        fun(*arguments, **options)
    except distributed.InputError as error:
        return str(error)
    raise AssertionError("no error")


print("second", message(distributed.initialize, "127.0.0.1:9", 3).replace("\\n", " "))
listening = [line.split()[1] for name in ("tcp", "tcp6") if os.path.exists(f"/proc/net/{name}")
             for line in open(f"/proc/net/{name}") if line.split()[3] == "0A"]
port = f"{int(found.coordinator.rsplit(':')[-1]):04X}"
here = [each for each in listening if each.endswith(":" + port)]
assert all(each.endswith("0100007F:" + port) for each in here), "the loopback interface alone"

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
own = np.arange(8 * 3, dtype=np.float32).reshape(8, 3) + 24 * found.index
batch = distributed.global_batch({"x": own, "y": own[:, 0].astype(np.int32)}, mesh)
x = batch["x"]
assert x.shape == (16, 3) and x.sharding.spec == jax.sharding.PartitionSpec("data"), x.sharding
assert all(each.data.shape == (2, 3) for each in x.addressable_shards)
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
gathered = jax.jit(lambda x: x, out_shardings=everywhere)(x)
assert np.array_equal(gathered.addressable_data(0), np.arange(48, dtype=np.float32).reshape(16, 3)), "process order"
assert float(jax.jit(jnp.sum)(x)) == sum(range(48))

# The control: what JAX makes of the same, without an error.
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
print("control", jax.make_array_from_process_local_data(sharding, own[: 8 - 4 * found.index]).shape)
print("rows", message(distributed.global_batch, own[: 8 - 4 * found.index], mesh).replace("\\n", " "))
print("leaves", message(distributed.global_batch, {"xy"[found.index]: own}, mesh).replace("\\n", " "))
print("dtypes", message(distributed.global_batch, own.astype(["float32", "float16"][found.index]), mesh).split(",")[0])
print("uneven", message(distributed.global_batch, own[: 8 - found.index], mesh).replace("\\n", " "))
print("scalar", message(distributed.global_batch, [own, 1.0][found.index], mesh).replace("\\n", " "))
print("global", message(distributed.global_batch, x, mesh).replace("\\n", " "))
print("part", message(distributed.global_batch, own, Mesh(jax.devices()[:4], ("data",))).replace("\\n", " "))

# Processes along another axis hold the same rows; devices in another order hold their own.
crossed = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("model", "data"))
assert distributed.global_batch(own - 24 * found.index, crossed).shape == (8, 3)
print("crossed", message(distributed.global_batch, own, crossed).replace("\\n", " "))
interleaved = Mesh(np.asarray(jax.devices()).reshape(2, 4).T.reshape(8), ("data",))
x = distributed.global_batch(own[:4], interleaved)
everywhere = jax.sharding.NamedSharding(interleaved, jax.sharding.PartitionSpec())
first = jax.jit(lambda x: x[:, 0], out_shardings=everywhere)(x)
assert np.array_equal(first.addressable_data(0), [0, 24, 3, 27, 6, 30, 9, 33]), first
assert float(jax.jit(jnp.sum)(distributed.global_batch(own, mesh))) == sum(range(48)), "none of the errors broke it"
print("done")
"""


def labelled(ended):
    """The lines that a process printed, by their first word."""
    return dict(line.split(" ", 1) for line in ended.output.splitlines() if " " in line)


def test_processes_hold_one_batch_together(tmp_path):
    ended = run(TOGETHER, tmp_path)
    for index, each in enumerate(ended):
        assert each.status == 0, each.output
        lines = labelled(each)
        assert re.fullmatch(
            rf"process {index} of 2, which met at 127.0.0.1:\d+ \(found by anybatch launch\)", lines["first"]
        )
        assert "coordinator_address='127.0.0.1:9', was '127.0.0.1:" in lines["second"]
        assert "num_processes=3, was 2" in lines["second"]
        assert lines["rows"].startswith(
            "Every process must pass the same number of rows, got     process 0: 8     process 1: 4 Drop some, "
            "rows[:4], or pad them to 8"
        )
        assert "process 0: 8 rows of batch['x']: float32[3]" in lines["leaves"]
        assert "process 1: 8 rows of batch['y']: float32[3]" in lines["leaves"]
        assert lines["dtypes"] == "Every process must pass the same leaves"
        assert "is a global one" in lines["global"]
        assert "process 0: 4 of 4     process 1: 0 of 4" in lines["part"]
        assert "Processes with the same indices along the axis must pass the same rows" in lines["crossed"]
        assert each.output.endswith("done\n")
    # The process whose rows are wrong says so in full, and the other one says which that is.
    other, own = map(labelled, ended)
    assert (other["control"], own["control"]) == ("(16, 3)", "(8, 3)")
    assert "got 7 rows for 4 devices. Drop some, rows[:4], or pad them to 8" in own["uneven"]
    assert "process 0: nothing wrong     process 1: The rows of a process must be shared evenly" in other["uneven"]
    assert "batch: 1.0" in own["scalar"] and "process 1: Every leaf of the batch must be an array" in other["scalar"]


@pytest.mark.full
@pytest.mark.parametrize(
    "index, seen", [(0, "it listens there"), (1, "nobody answers there, so process 0 is missing or cannot be reached")]
)
def test_a_process_that_never_comes_is_an_error(tmp_path, index, seen):
    """JAX alone aborts, without a word on who is missing."""
    body = """
    try:
        distributed.initialize(timeout=2)
    except distributed.MissingPeerError as error:
        assert isinstance(error, distributed.AnybatchError) and isinstance(error, TimeoutError)
        assert not jax.distributed.is_initialized()
        print("caught")
    distributed.initialize(timeout=2)
    """
    (ended,) = run(body, tmp_path, only=[index], timeout=30)
    assert ended.status == 1, ended.output
    assert ended.seconds < 15
    assert "caught\n" in ended.output and "All 2 processes must join within 2 seconds" in ended.output
    assert f"This is process {index}, and the address is 127.0.0.1:" in ended.output
    assert seen in ended.output and "initialize(timeout=4)" in ended.output


START = """
found = distributed.initialize(timeout=300, heartbeat=3)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
x, total = distributed.global_batch(np.ones(4, np.float32), mesh), jax.jit(jnp.sum)
float(total(x))
"""


@pytest.mark.parametrize("others", ["float(total(x))", "time.sleep(0.1)"], ids=["they compute", "they sleep"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_killed_ends_the_others(tmp_path, lost, others):
    """The bound: about `heartbeat` seconds, here 3, even if they need nothing from it."""
    body = f"{START}\nwhile True: os.kill(os.getpid(), signal.SIGKILL) if found.index == {lost} else {others}\n"
    ended = run(body, tmp_path, devices=1)
    assert ended[lost].status == -9, ended[lost].output
    assert ended[1 - lost].status != 0, ended[1 - lost].output
    assert ended[1 - lost].seconds - ended[lost].seconds < 3 + 5  # this machine may be busy


def test_an_exception_in_one_process_ends_all(tmp_path):
    """JAX alone waits for five minutes at the end of the one for the other, which waits for it."""
    hook = """
earlier = sys.excepthook
sys.excepthook = lambda *error: (print("the user's own hook"), earlier(*error))
"""
    body = f"""{hook}{START}
if found.index == 1: raise ArithmeticError("the loss is not a number")
while True: float(total(x))
"""
    other, failed = run(body, tmp_path, devices=1)
    assert failed.status == 1
    assert "the user's own hook" in failed.output and "ArithmeticError: the loss is not a number" in failed.output
    assert other.status != 0, other.output
    assert other.seconds - failed.seconds < 3 + 5


@pytest.mark.full
def test_slurm_is_found(tmp_path):
    port = str(launch.free_port())

    def slurm(index):
        step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
        return step | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index), "JAX_COORDINATOR_PORT": port}

    ended = run("print(distributed.initialize(timeout=40))", tmp_path, environment=slurm)
    for index, each in enumerate(ended):
        assert each.output == f"process {index} of 2, which met at localhost:{port} (found by SLURM)\n"
        assert each.status == 0


@pytest.mark.full
def test_a_port_in_use_is_an_error(tmp_path):
    body = """
    import socket
    taken = socket.create_server(("127.0.0.1", 0))
    distributed.initialize(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0, timeout=20)
    """
    (ended,) = run(body, tmp_path, only=[0], timeout=40)
    assert ended.status == 1
    assert "Process 0 of 2 must be able to meet the others at 127.0.0.1:" in ended.output
    assert "Use a port that is free" in ended.output


# In this process, alone.


def test_alone_nothing_is_done():
    hook = sys.excepthook
    assert distributed.initialize() == distributed.Processes(0, 1, None, "nothing")
    assert distributed.initialize(num_processes=1).found_by == "arguments"
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


def test_alone_under_a_launcher(monkeypatch):
    for name, value in {"COORDINATOR": "127.0.0.1:1", "NUM_PROCESSES": "1", "PROCESS_ID": "0"}.items():
        monkeypatch.setenv(f"ANYBATCH_{name}", value)
    assert str(distributed.initialize()) == "one process alone (found by anybatch launch)"
    monkeypatch.delenv("ANYBATCH_PROCESS_ID")
    with pytest.raises(InputError, match=r"(?s)ANYBATCH_PROCESS_ID: None.*unset ANYBATCH_COORDINATOR"):
        distributed.initialize()


def test_processes_join_before_the_first_device_is_used():
    jax.devices()
    with pytest.raises(InputError, match=r"(?s)must join before JAX uses a device.*the first line of the script"):
        distributed.initialize("127.0.0.1:1234", 2, 0)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"coordinator_address": "10.0.0.1"}, "coordinator_address must be a string \"host:port\", got .*'10.0.0.1'"),
        ({"coordinator_address": "10.0.0.1:0"}, "host:port"),
        ({"coordinator_address": 1234}, "host:port"),
        ({"coordinator_address": "10.0.0.1:1234"}, "belong together .*num_processes=None, process_id=None"),
        ({"num_processes": 0}, "num_processes must be an integer of 1 or more, got num_processes=0"),
        ({"num_processes": 2.0}, "got num_processes=2.0"),
        ({"num_processes": 2, "process_id": 2}, "from 0 to num_processes - 1, got process_id=2, num_processes=2"),
        ({"process_id": -1}, "got process_id=-1"),
        ({"timeout": 0}, "timeout must be a number of seconds, got timeout=0"),
        ({"timeout": float("nan")}, "got timeout=nan"),
        ({"heartbeat": 0.5}, "heartbeat must be an integer number of seconds, got heartbeat=0.5"),
    ],
)
def test_settings_that_cannot_be(given, text):
    with pytest.raises(InputError, match=f"(?s){text}.*initialize\\(coordinator_address="):
        distributed.initialize(**given)


def one_mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def test_alone_the_rows_are_the_batch():
    batch = {"x": np.arange(48.0, dtype=np.float32).reshape(16, 3), "y": np.arange(16)}
    placed = distributed.global_batch(batch, one_mesh())
    for name, leaf in batch.items():
        assert placed[name].sharding == NamedSharding(one_mesh(), PartitionSpec("data"))
        np.testing.assert_array_equal(placed[name], leaf)


def test_rows_are_repeated_over_other_axes():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    x = distributed.global_batch(np.arange(8), mesh)
    assert x.shape == (8,) and {each.data.shape for each in x.addressable_shards} == {(2,)}


@pytest.mark.parametrize(
    "batch, mesh, text",
    [
        (np.ones(12), None, r"got 12 rows for 8 devices\.\nDrop some, rows\[:8\], or pad them to 16"),
        ({"x": np.ones(8), "y": np.ones(16)}, None, r"(?s)batch\['x'\]: 8\n.*batch\['y'\]: 16"),
        ({"x": np.ones(8), "n": 3}, None, r"(?s)an array on the host, with rows along axis 0.*batch\['n'\]: 3"),
        ({}, None, "got no leaves"),
        (np.ones(8), jax.sharding.AbstractMesh((8,), ("data",)), "mesh must be a jax.sharding.Mesh"),
        (np.ones(8), Mesh(jax.devices(), ("rows",)), r"(?s)got axis_name='data'.*axis_name='rows'"),
    ],
)
def test_batches_that_cannot_be_placed(batch, mesh, text):
    with pytest.raises(InputError, match=text):
        distributed.global_batch(batch, mesh or one_mesh())
