"""Batches ahead of the step: all of them, in order, safe from whoever overwrites them, and never in the way."""

import functools
import gc
import itertools
import subprocess
import sys
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from anybatch.errors import InputError
from anybatch.training.prefetch import Prefetcher, to_device
from anybatch.training.sources import Batches, open_source

SHAPE = (64, 64)


def aligned():
    """Zeros that begin at a page, which JAX on the CPU uses as they are if it may."""
    size = 4 * SHAPE[0] * SHAPE[1]
    raw = np.zeros(size + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + size].view(np.float32).reshape(SHAPE)


def one_buffer(number):
    """A loader that has one array, and overwrites it with every batch."""
    buffer = aligned()
    for value in range(number):
        buffer[:] = value
        yield buffer
    buffer[:] = -1


def values(prefetcher):
    """The first number of every batch, looked at when all are there."""
    batches = [batch for batch, _ in prefetcher]
    return [float(batch[0, 0]) for batch in batches]


def numbered(pulled, number=None):
    """Notes what is pulled from it."""
    for value in itertools.count() if number is None else range(number):
        pulled.append(value)
        yield np.full(2, value), {"at": value}


def until(condition):
    """Waits for another thread, and fails if it takes too long."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


_OF_OTHER_TESTS = set()  # threads of tests before, such as one whose source never returns


def threads():
    found = [thread for thread in threading.enumerate() if thread.name == "anybatch-prefetch"]
    return [thread for thread in found if thread not in _OF_OTHER_TESTS]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    _OF_OTHER_TESTS.update(threads())
    before = set(threads())
    yield
    until(lambda: not set(threads()) - before)


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
def test_all_batches_come_in_order_with_their_positions(ahead):
    source = Batches({"x": np.arange(40).reshape(20, 2)}, 3, drop_last=False)
    expected = list(open_source(source, epochs=2))
    with Prefetcher(open_source(source, epochs=2), ahead=ahead) as prefetcher:
        actual = list(prefetcher)
        assert next(prefetcher, None) is None  # the end stays the end
    assert [position for _, position in actual] == [position for _, position in expected]
    for (batch, _), (other, _) in zip(actual, expected, strict=True):
        assert isinstance(batch["x"], jax.Array)
        np.testing.assert_array_equal(batch["x"], other["x"])


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_so_many_are_drawn_ahead_and_no_more(ahead):
    pulled = []
    with Prefetcher(numbered(pulled), ahead=ahead) as prefetcher:
        until(lambda: len(pulled) == ahead)
        next(prefetcher), next(prefetcher)
        until(lambda: len(pulled) == ahead + 2)
        time.sleep(0.05)
        assert len(pulled) == ahead + 2


def test_without_a_thread_nothing_is_drawn_before_it_is_asked_for():
    pulled, drawn_in = [], []

    def put(batch):
        drawn_in.append(threading.current_thread())
        return batch

    with Prefetcher(numbered(pulled), put, ahead=0) as prefetcher:
        assert prefetcher.ready() and not pulled and not threads()
        next(prefetcher)
        assert pulled == [0] and drawn_in == [threading.current_thread()]
    with Prefetcher(numbered(pulled), put, ahead=1) as prefetcher:  # the control
        next(prefetcher)
        assert drawn_in[-1] != threading.current_thread()


@pytest.mark.parametrize("ahead", [0, 4])
def test_what_was_drawn_and_not_used_is_not_lost(ahead):
    source = Batches(np.arange(30), 3, seed=4)
    expected = [batch for batch, _ in itertools.islice(open_source(source), 14)]
    used, position, ends = [], None, []
    while len(used) < len(expected):  # stopped after every batch or two
        with Prefetcher(open_source(source, position=position), ahead=ahead) as prefetcher:
            drawn = list(itertools.islice(prefetcher, 1 + len(used) % 2))
            used, position = [*used, *(batch for batch, _ in drawn)], drawn[-1][1]
            until(lambda prefetcher=prefetcher: len(prefetcher._queue.items) == ahead)
            ends.append(prefetcher._queue.drawn)
    np.testing.assert_array_equal(used[: len(expected)], expected)
    # The control: the source itself stood further on, where it would have been wrong to go on.
    assert ends[0] == 1 + ahead


class TestOverwriting:
    @pytest.mark.parametrize("ahead", [0, 2])
    def test_a_loader_may_overwrite_its_arrays(self, ahead):
        with Prefetcher(open_source(one_buffer(5)), ahead=ahead) as prefetcher:
            assert values(prefetcher) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("put", [jax.device_put, functools.partial(jax.device_put, may_alias=False)])
    def test_the_comparison_can_fail(self, put):
        """The control: put as JAX does it, the batches are overwritten, and asking it not to does not help."""
        with Prefetcher(open_source(one_buffer(5)), put, ahead=0) as prefetcher:
            assert values(prefetcher) != [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("kind", ["default", "device", "repeated", "spread"])
    def test_wherever_they_go(self, kind):
        mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
        shardings = {"device": jax.devices()[3], "repeated": P(), "spread": P("data")}
        sharding = shardings.get(kind)
        sharding = NamedSharding(mesh, sharding) if isinstance(sharding, P) else sharding
        copied, shared = aligned(), aligned()
        batch, control = to_device(copied, sharding), jax.device_put(shared, sharding)
        jax.block_until_ready((batch, control))
        copied[:], shared[:] = 7, 7
        assert not np.asarray(batch).any() and np.asarray(control).any()
        if sharding is not None:
            assert batch.sharding == control.sharding


class TestErrors:
    @pytest.mark.parametrize("ahead", [0, 2, 5])
    @pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt(), SystemExit(3)])
    def test_of_the_source_come_after_the_good_batches_with_their_own_traceback(self, error, ahead):
        def a_broken_loader():
            yield from numbered([], 3)
            raise error

        with Prefetcher(a_broken_loader(), ahead=ahead) as prefetcher:
            assert [position["at"] for _, position in itertools.islice(prefetcher, 3)] == [0, 1, 2]
            with pytest.raises(type(error)) as caught:
                next(prefetcher)
            assert caught.value is error
            names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert "a_broken_loader" in names
            assert next(prefetcher, None) is None

    @pytest.mark.parametrize("ahead", [0, 2])
    def test_of_put(self, ahead):
        def put(batch):
            if batch[0] == 2:
                raise MemoryError("no room")
            return batch

        with Prefetcher(numbered([]), put, ahead=ahead) as prefetcher:
            next(prefetcher), next(prefetcher)
            with pytest.raises(MemoryError, match="no room"):
                next(prefetcher)

    @pytest.mark.parametrize("ahead", [0, 2])
    def test_another_kind_of_batch(self, ahead):
        good, other = {"x": np.zeros((2, 3))}, {"x": np.zeros((2, 3), np.int32)}
        smaller = {"x": np.zeros((1, 3))}
        with Prefetcher(open_source([good, smaller, other]), ahead=ahead) as prefetcher:
            next(prefetcher), next(prefetcher)
            with pytest.raises(InputError, match=r"batch 3, with\n .*batch\['x'\]: float64 of rank 2 .*, int32 of"):
                next(prefetcher)

    def test_an_empty_source(self):
        with Prefetcher(open_source([])) as prefetcher, pytest.raises(InputError, match="pass 1 is empty"):
            next(prefetcher)

    @pytest.mark.parametrize(
        "array", [np.array(["a"]), np.zeros(2, [("a", "f4")]), np.array([None]), np.zeros(2, ">i4")]
    )
    def test_what_jax_cannot_hold(self, array):
        with Prefetcher(open_source([{"x": np.zeros(2), "bad": array}])) as prefetcher:
            with pytest.raises(InputError, match=r"a dtype that JAX has: .*, got batch\['bad'\]: .*\nConvert text"):
                next(prefetcher)

    @pytest.mark.parametrize("ahead", [-1, 1.5, True])
    def test_a_number_that_cannot_be(self, ahead):
        with pytest.raises(InputError, match="ahead must be a whole number of at least 0"):
            Prefetcher(numbered([]), ahead=ahead)


class TestWhatPasses:
    def test_jax_arrays_keys_numbers_and_text_as_they_are(self):
        batch = {"a": jnp.ones(3), "k": jax.random.key(0), "i": 3, "f": 0.5, "b": True, "s": "text", "t": np.str_("x")}
        batch["none"] = None
        with Prefetcher(open_source([batch])) as prefetcher:
            actual, _ = next(prefetcher)
        assert actual.keys() == batch.keys()
        assert all(actual[name] is batch[name] for name in batch)

    def test_scalars_of_numpy_and_tensors_of_others_as_arrays(self):
        class Tensor:
            def __array__(self, dtype=None, copy=None):
                return aligned()

        actual = to_device({"scalar": np.float32(3), "tensor": Tensor()})
        assert isinstance(actual["scalar"], jax.Array) and actual["scalar"].shape == ()
        assert isinstance(actual["tensor"], jax.Array) and actual["tensor"].shape == SHAPE

    def test_the_settings_of_the_caller(self):
        """Precision and device belong to a thread in JAX; in a thread like any other, the control, they are lost."""
        found = []

        def source():
            while True:
                found.append(jnp.zeros(1).devices())
                yield np.zeros(2, np.float64), {}

        with jax.enable_x64(True), jax.default_device(jax.devices()[5]):
            with Prefetcher(source()) as prefetcher:
                batch, _ = next(prefetcher)
            lost = []
            plain = threading.Thread(target=lambda: lost.append(to_device(np.zeros(2, np.float64))))
            plain.start()
            plain.join()
        assert batch.dtype == jnp.float64 and batch.devices() == found[0] == {jax.devices()[5]}
        assert lost[0].dtype == jnp.float32 and lost[0].devices() == {jax.devices()[0]}


class TestEnding:
    def test_closing_ends_the_thread_and_closes_the_source(self):
        closed = []

        def source():
            try:
                yield from numbered([])
            finally:
                closed.append(threading.current_thread().name)

        prefetcher = Prefetcher(source())
        next(prefetcher)
        prefetcher.close()
        assert not threads() and closed == ["anybatch-prefetch"]
        assert next(prefetcher, None) is None
        prefetcher.close()  # once more does no harm

    def test_a_source_that_hangs_does_not_keep_closing_waiting(self):
        hang, after = threading.Event(), []

        def source():
            yield np.zeros(2), {}
            hang.wait()
            yield np.ones(2), {}

        def put(batch):
            after.append(batch)
            return batch

        prefetcher = Prefetcher(source(), put)
        next(prefetcher)
        assert not prefetcher.ready(0.05)
        begin = time.monotonic()
        prefetcher.close()
        assert time.monotonic() - begin < 1
        assert threads()  # the control: it hangs indeed
        hang.set()
        until(lambda: not threads())
        assert next(prefetcher, None) is None and len(after) == 1  # what came too late is not put anywhere

    def test_a_feed_that_is_forgotten_ends(self):
        prefetcher = Prefetcher(numbered([]))
        next(prefetcher)
        assert threads()
        del prefetcher
        gc.collect()
        assert not threads()

    def test_a_process_can_end_while_a_source_hangs_or_works(self):
        program = """
import time, numpy as np
from anybatch.training.prefetch import Prefetcher
def hangs():
    yield np.zeros(2), {}
    time.sleep(600)
def works():
    while True:
        yield np.zeros((512, 512)), {}
prefetchers = [Prefetcher(hangs()), Prefetcher(works(), ahead=10**6)]
for prefetcher in prefetchers:
    next(prefetcher)
time.sleep(0.1)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")

    def test_ready_says_whether_next_would_wait(self):
        go = threading.Event()

        def source():
            go.wait()
            yield np.zeros(2), {}

        with Prefetcher(source()) as prefetcher:
            assert not prefetcher.ready() and not prefetcher.ready(0.01)
            go.set()
            assert prefetcher.ready(20)
            next(prefetcher)
            assert prefetcher.ready(20)  # the end is there as well
            assert next(prefetcher, None) is None
