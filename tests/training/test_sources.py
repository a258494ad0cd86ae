"""Where batches come from: the same ones in the same order, however often a run is stopped and goes on."""

import itertools
import json
import random
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anybatch.errors import InputError
from anybatch.training.prefetch import batch_spec, check_spec
from anybatch.training.sources import Batches, open_source

ROWS = np.arange(20, dtype=np.float32).reshape(10, 2)


def in_memory(**options):
    return lambda: Batches({"x": ROWS, "y": (np.arange(10),)}, 3, **options)


class Shuffling:
    """A loader that shuffles every pass by a generator of its own, and has no state to save."""

    def __init__(self):
        self.random = random.Random(0)

    def __iter__(self):
        rows = list(range(10))
        self.random.shuffle(rows)
        return (ROWS[rows[start : start + 4]] for start in range(0, 10, 4))


class Stateful:
    """As torchdata's loaders: the state is loaded into the loader, which then makes an iterator that has it."""

    def __init__(self, *, state_as=lambda state: state):
        self.loaded, self.iterator, self.drawn, self.state_as = None, None, 0, state_as

    def __iter__(self):
        start, self.loaded = self.loaded or 0, None
        self.iterator = StatefulIterator(self, start)
        return self.iterator

    def state_dict(self):
        return {"at": self.state_as(self.iterator.at)}

    def load_state_dict(self, state):
        self.loaded = int(np.asarray(state["at"]).item())


class StatefulIterator:
    def __init__(self, loader, at):
        self.loader, self.at = loader, at

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 4:
            raise StopIteration
        self.at, self.loader.drawn = self.at + 1, self.loader.drawn + 1
        return ROWS[self.at - 1 : self.at + 1]

    def state_dict(self):
        return self.loader.state_dict()


def map_dataset():
    return grain.MapDataset.source(ROWS).shuffle(seed=1).batch(3)


def mixed():
    parts = [map_dataset(), grain.MapDataset.source(-ROWS).repeat().batch(3)]
    few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    return grain.IterDataset.mix([part.to_iter_dataset(few) for part in parts], weights=[0.5, 0.5])


def unbatched():
    rows = grain.MapDataset.source(ROWS).to_iter_dataset()
    return rows.pipe(grain.experimental.WindowShuffleIterDataset, window_size=4, seed=2).batch(3)


def data_loader():
    sampler = grain.samplers.IndexSampler(10, num_epochs=1, shuffle=True, seed=0)
    shard = grain.sharding.NoSharding()
    batch = [grain.transforms.Batch(3)]
    return grain.DataLoader(data_source=list(ROWS), sampler=sampler, operations=batch, shard_options=shard)


# What makes the source, and the kind of position it has.
SOURCES = {
    "batches": (in_memory(seed=5), "batches"),
    "batches, all examples": (in_memory(drop_last=False), "batches"),
    "batches, in order": (in_memory(shuffle=False, drop_last=False), "batches"),
    "list": (lambda: [ROWS[:3], ROWS[3:6], ROWS[6:]], "iterable"),
    "shuffling": (Shuffling, "iterable"),
    "generator": (lambda: (ROWS[start % 8 :] for start in range(9)), "iterable"),
    "endless generator": (lambda: (ROWS + number for number in itertools.count()), "iterable"),
    "state_dict": (Stateful, "state_dict"),
    "state_dict of arrays": (lambda: Stateful(state_as=np.int32), "state_dict"),
    "state_dict that JSON cannot hold": (
        lambda: Stateful(state_as=lambda state: np.array([state], object)),
        "state_dict",
    ),
    "map dataset": (map_dataset, "get_state"),
    "endless map dataset": (lambda: map_dataset().repeat(), "get_state"),
    "mixed": (mixed, "get_state"),
    "shuffled in windows": (unbatched, "get_state"),
    "iterator of a dataset": (lambda: iter(map_dataset().repeat(3).to_iter_dataset()), "get_state"),
    "data loader": (data_loader, "get_state"),
    "iterator of a data loader": (lambda: iter(data_loader()), "get_state"),
}


def drawn(source, number=None, **options):
    return list(itertools.islice(open_source(source, **options), number))


def in_bytes(pulls):
    return [[(leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in jax.tree.leaves(batch)] for batch, _ in pulls]


@pytest.mark.parametrize("name", SOURCES)
def test_going_on_at_any_position_gives_the_batches_of_never_stopping(name):
    make, kind = SOURCES[name]
    without_end = drawn(make(), 9)  # two passes and more, for those that have an end
    assert {position["kind"] for _, position in without_end} == {kind}
    expected = in_bytes(without_end)
    for number, (_, position) in enumerate(without_end, 1):
        saved = json.loads(json.dumps(position))
        assert in_bytes(drawn(make(), len(expected) - number, position=saved)) == expected[number:]


@pytest.mark.parametrize("name", SOURCES)
def test_the_comparison_can_fail(name):
    """The control: without the position, or with that of one batch before, other batches come."""
    make, _ = SOURCES[name]
    pulls = drawn(make(), 4 if name != "iterator of a data loader" else 3)
    expected = in_bytes(pulls)[2:]
    assert in_bytes(drawn(make(), len(expected))) != expected
    assert in_bytes(drawn(make(), len(expected), position=pulls[0][1])) != expected


@pytest.mark.parametrize("name", ["batches", "list", "shuffling", "state_dict", "map dataset", "mixed", "data loader"])
def test_so_many_epochs_are_so_many_passes_wherever_they_go_on(name):
    make, _ = SOURCES[name]
    one, two = drawn(make(), epochs=1), drawn(make(), epochs=2)
    assert len(two) == 2 * len(one)
    for number in range(len(two)):
        rest = drawn(make(), epochs=2, position=two[number][1])
        assert in_bytes(rest) == in_bytes(two)[number + 1 :]
    assert drawn(make(), epochs=1, position=two[-1][1]) == []  # fewer epochs than were gone through already


def test_a_map_dataset_holds_few_batches_ahead():
    """In memory there are those of grain's threads; in the control, grain's own choice for single examples."""

    def made(open_it, *, patience, enough):
        """How many examples are made for two that are drawn, after some seconds or when they are enough."""
        rows = []
        dataset = grain.MapDataset.range(10**6).map(lambda row: rows.append(row) or row)
        opened = open_it(dataset)
        next(opened), next(opened)
        end = time.monotonic() + patience
        while len(rows) < enough and time.monotonic() < end:
            time.sleep(0.01)
        return len(rows)

    assert made(open_source, patience=0.2, enough=100) <= 20
    assert made(iter, patience=20, enough=100) >= 100


def test_a_state_is_loaded_and_nothing_is_drawn_twice():
    loader = Stateful()
    _, position = drawn(Stateful(), 7)[-1]
    drawn(loader, 1, position=position)
    assert loader.drawn == 1
    # The control: of a state that JSON cannot hold, the batches are drawn once more.
    hidden = Stateful(state_as=lambda state: np.array([state], object))
    _, position = drawn(hidden, 7)[-1]
    again = Stateful(state_as=lambda state: np.array([state], object))
    drawn(again, 1, position=position)
    assert again.drawn == 8


def test_whoever_waits_is_told_how_many_batches_are_drawn_once_more():
    told = []
    _, position = drawn([1, 2, 3], 5)[-1]
    drawn([1, 2, 3], 1, position=position, notify=lambda done, total: told.append((done, total)))
    assert told == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    drawn(in_memory()(), 1, position=drawn(in_memory()(), 4)[-1][1], notify=lambda *_: pytest.fail("drawn once more"))


@pytest.mark.parametrize(
    "state, is_saved",
    [
        ({"a": [1, 0.1, None, True, {"b": "\u00fc"}], "n": 2**100}, True),
        (b"\x00\xff", True),
        ({"a": (1, 2)}, False),
        ({3: "a"}, False),
        ({"a": np.arange(3)}, False),
        ({"a": b"\x00"}, False),
        ({"a": float("nan")}, False),
    ],
)
def test_a_state_comes_back_as_what_it_was_or_is_not_saved(state, is_saved):
    """Without a saved state, the earlier batches are drawn again."""

    class Loader:
        def __init__(self):
            self.drawn, self.new = 0, None

        def __iter__(self):
            return self

        def __next__(self):
            self.drawn += 1
            return ROWS

        def get_state(self):
            return state

        def set_state(self, new):
            self.new = new

    _, position = next(open_source(Loader()))
    assert ("state" in position) == is_saved and position.get("state") is not state
    loader = Loader()
    next(open_source(loader, position=json.loads(json.dumps(position))))
    assert repr(loader.new) == repr(state if is_saved else None) and loader.drawn == (1 if is_saved else 2)


def test_iterators_that_were_made_here_are_closed_and_those_of_the_caller_are_not():
    closed = []

    def generate():
        try:
            yield from (1, 2, 3)
        finally:
            closed.append(True)

    class Loader:
        def __iter__(self):
            return generate()

    opened = open_source(Loader())
    next(opened)
    opened.close()
    assert closed == [True]
    mine = generate()
    opened = open_source(mine)
    next(opened)
    opened.close()
    assert next(mine) == 2 and closed == [True]


class TestBatches:
    def test_an_epoch_has_every_example_once_and_its_rows_together(self):
        batches = Batches({"x": ROWS, "y": np.arange(10)}, 3, drop_last=False)
        epoch = list(batches)
        assert [len(batch["y"]) for batch in epoch] == [3, 3, 3, 1] and len(batches) == 4
        order = np.concatenate([batch["y"] for batch in epoch])
        assert sorted(order) == list(range(10))
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in epoch]), ROWS[order])
        assert len(list(Batches(ROWS, 3))) == len(Batches(ROWS, 3)) == 3

    def test_the_order_depends_on_seed_and_epoch_alone(self):
        """In numbers: another version of numpy, or of this library, must give the same."""

        def order(seed, epoch):
            return next(Batches(np.arange(8), 8, seed=seed).epoch(epoch)).tolist()

        assert order(0, 0) == GOLDEN[0, 0]
        assert order(0, 1) == GOLDEN[0, 1]
        assert order(1, 0) == GOLDEN[1, 0]
        assert order(2**64 - 1, 3) == GOLDEN[2**64 - 1, 3]
        batches = Batches(np.arange(8), 8)
        assert [next(iter(batches)).tolist() for _ in range(2)] == [GOLDEN[0, 0]] * 2

    def test_shuffling_is_fair(self):
        """Each example comes first about as often: chi-squared, 7 degrees of freedom, far beyond 1 in a million."""
        firsts = [int(next(Batches(np.arange(8), 1).epoch(epoch))[0]) for epoch in range(4000)]
        assert np.sum((np.bincount(firsts, minlength=8) - 500) ** 2 / 500) < 45

    def test_batches_are_copies(self):
        for shuffle in (True, False):
            rows = ROWS.copy()
            batch = next(iter(Batches(rows, 3, shuffle=shuffle)))
            assert batch.flags.c_contiguous and batch.flags.owndata and not np.shares_memory(batch, rows)
        assert np.shares_memory(rows[:3], rows)  # the control

    def test_arrays_of_jax_are_fetched_once(self, monkeypatch):
        batches = Batches({"x": jnp.asarray(ROWS), "h": jnp.ones((10, 1), jnp.bfloat16)}, 5, shuffle=False)
        monkeypatch.setattr(type(jnp.zeros(())), "__array__", lambda *_: pytest.fail("fetched again"))
        first = next(iter(batches))
        assert type(first["x"]) is np.ndarray and first["h"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(first["x"], ROWS[:5])

    def test_a_file_stays_on_the_disk(self, tmp_path):
        np.save(tmp_path / "rows.npy", ROWS)
        rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
        batches = Batches(rows, 5, shuffle=False)
        assert np.shares_memory(batches._arrays[0], rows)
        assert type(next(iter(batches))) is np.ndarray

    def test_rows_are_gathered_without_python(self):
        """The calls of one batch do not grow with its rows; in the control, one call for each row, they do."""
        rows = np.zeros((8192, 4), np.float32)

        def calls(fun):
            events = []
            sys.setprofile(lambda frame, event, argument: events.append(event))
            fun()
            sys.setprofile(None)
            return len(events)

        few, many = (iter(Batches(rows, size)) for size in (8, 4096))
        next(few), next(many)  # the order is made with the first
        assert calls(lambda: next(few)) == calls(lambda: next(many)) < 50
        assert calls(lambda: [rows.take(row, axis=0) for row in range(4096)]) > 4096

    @pytest.mark.parametrize(
        "arrays, options, message",
        [
            ({}, {}, "tree of arrays .*, got a tree without leaves"),
            ({"x": [1, 2]}, {}, r"arrays\['x'\]\[0\]: 1"),
            ({"x": np.float32(1)}, {}, r"arrays\['x'\]: float32\[\]"),
            ((np.zeros(3), np.zeros(4)), {}, r"arrays\[0\]: float64\[3\]\n    arrays\[1\]: float64\[4\]"),
            (np.zeros((0, 2)), {}, "at least one, got arrays: float64"),
            (np.array(["a", "b"]), {}, "a dtype that JAX has: .*, got arrays: <U1"),
            (np.zeros(3, [("a", "f4")]), {}, r"array\['field'\]"),
            (np.zeros(3, object), {}, "got arrays: object"),
            (np.zeros(3, ">f4"), {}, "byte order, got arrays: >f4"),
            (np.zeros(3, np.longdouble), {}, "got arrays: float128"),
            (np.zeros(3, "M8[s]"), {}, "got arrays: datetime64"),
            (np.zeros(3, "m8[s]"), {}, "got arrays: timedelta64"),
            (jax.random.split(jax.random.key(0), 3), {}, r"jax.random.key_data\(keys\)"),
            (ROWS, {"batch_size": 11}, "batch_size=11 for 10 examples"),
            (ROWS, {"batch_size": 0}, "batch_size must be a whole number of at least 1, got batch_size=0"),
            (ROWS, {"batch_size": 2.5}, "got batch_size=2.5"),
            (ROWS, {"batch_size": True}, "got batch_size=True"),
            (ROWS, {"seed": -1}, "seed must be a whole number of at least 0, got seed=-1"),
            (ROWS, {"seed": 2**64}, "seed must be below"),
        ],
    )
    def test_refuses_what_cannot_be(self, arrays, options, message):
        with pytest.raises(InputError, match=message):
            Batches(arrays, **{"batch_size": 2, **options})

    def test_takes_every_dtype_that_jax_has(self):
        """The control of the refusals."""
        for dtype in (
            np.bool_,
            np.int8,
            np.uint64,
            np.float16,
            jnp.bfloat16,
            jnp.int4,
            jnp.float8_e4m3fn,
            np.complex128,
        ):
            assert next(iter(Batches(np.zeros(3, dtype), 2))).dtype == dtype

    def test_a_start_beyond_the_end_is_refused_at_once(self):
        with pytest.raises(InputError, match="batches 0 to 2, got epoch=0, start=4"):
            Batches(ROWS, 3).epoch(0, start=4)
        assert list(Batches(ROWS, 3).epoch(0, start=3)) == []


GOLDEN = {
    (0, 0): [0, 2, 1, 5, 4, 3, 6, 7],
    (0, 1): [5, 3, 7, 2, 4, 1, 0, 6],
    (1, 0): [3, 5, 2, 7, 0, 6, 1, 4],
    (2**64 - 1, 3): [3, 2, 0, 1, 6, 5, 4, 7],
}


KINDS = ["batches", "list", "map dataset", "state_dict"]


class OnlyOnce:
    """Looks as if it could be begun anew, and cannot."""

    def __init__(self, rows):
        self.rest = iter(rows)

    def __iter__(self):
        return iter(list(self.rest))


class TestRefusals:
    @pytest.mark.parametrize("source", [[], (), OnlyOnce([]), iter([]), grain.MapDataset.source([]).batch(2)])
    def test_a_source_without_a_batch(self, source):
        with pytest.raises(InputError, match=r"at least one, got none from a .*: pass 1 is empty"):
            next(open_source(source))

    def test_a_second_pass_without_a_batch(self):
        opened = open_source(OnlyOnce([1, 2]))
        assert [next(opened)[0], next(opened)[0]] == [1, 2]
        with pytest.raises(
            InputError, match=r"OnlyOnce: pass 2 is empty.*\n.*__iter__ makes a new iterator .* epochs=1"
        ):
            next(opened)
        assert [batch for batch, _ in open_source(OnlyOnce([1, 2]), epochs=1)] == [1, 2]  # the control

    def test_an_iterator_ends_once(self):
        assert [batch for batch, _ in open_source(iter([1, 2]))] == [1, 2]
        assert [batch for batch, _ in open_source(iter([1, 2]), epochs=1)] == [1, 2]
        with pytest.raises(InputError, match="epochs=2 and a generator"):
            open_source((number for number in range(3)), epochs=2)
        assert [batch for batch, _ in open_source([1, 2], epochs=2)] == [1, 2, 1, 2]  # the control

    @pytest.mark.parametrize("source", [ROWS, jnp.asarray(ROWS), {"x": ROWS}, "rows.npy"])
    def test_what_would_be_cut_into_rows_keys_or_letters(self, source):
        with pytest.raises(InputError, match=r"rows, keys or letters.\n.*Batches\(arrays, batch_size=32\)"):
            open_source(source)

    @pytest.mark.parametrize("source, message", [(3, "got a int"), (None, "got a NoneType"), (lambda: [1], "Call the")])
    def test_what_cannot_be_iterated_over(self, source, message):
        with pytest.raises(InputError, match=message):
            open_source(source)

    @pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "2"])
    def test_epochs_that_are_no_number(self, epochs):
        with pytest.raises(InputError, match="epochs must be a whole number of at least 1"):
            open_source([1], epochs=epochs)

    @pytest.mark.parametrize("old, new", list(itertools.permutations(KINDS, 2)))
    def test_a_position_of_another_kind_of_source(self, old, new):
        _, position = drawn(SOURCES[old][0](), 2)[-1]
        with pytest.raises(InputError, match=r"same kind of source, got a position of .*, for a .*\n.*resume=False"):
            open_source(SOURCES[new][0](), position=position)

    @pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 2}, {"shuffle": False}, {"drop_last": False}])
    def test_batches_that_are_made_otherwise(self, change):
        _, position = drawn(Batches(ROWS, 3), 2)[-1]
        changed = Batches(ROWS, **{"batch_size": 3, **change})
        ((name, value),) = change.items()
        with pytest.raises(InputError, match=f"the same options as before.*\n?.*{name}={value}, and .* before"):
            open_source(changed, position=position)

    def test_a_source_with_fewer_batches_than_were_drawn(self):
        _, position = drawn([1, 2, 3], 5)[-1]
        for source in ([1, 2], [1, 2, 3, 4], iter([1, 2, 3])):
            with pytest.raises(InputError, match="batch 2 of pass 2 was the last one drawn, number 5 of all"):
                next(open_source(source, position=position))
        assert next(open_source([1, 2, 3], position=position))[0] == 3  # the control

    def test_a_state_that_a_loader_does_not_take_back(self):
        class Batched:
            def __len__(self):
                return 10

            def __getitem__(self, row):
                return ROWS[row]

        def loader(source):
            sampler = grain.samplers.IndexSampler(10, num_epochs=1, shuffle=True, seed=0)
            return grain.DataLoader(data_source=source, sampler=sampler, shard_options=grain.sharding.NoSharding())

        _, position = drawn(loader(Batched()), 2)[-1]
        with pytest.raises(InputError, match=r"ValueError from a DataLoader: DataSource in .*(.|\n)*needs a __repr__"):
            open_source(loader(Batched()), position=position)
        Batched.__repr__ = lambda self: "Rows()"
        _, position = drawn(loader(Batched()), 2)[-1]
        next(open_source(loader(Batched()), position=position))  # the control, and the way out

    def test_an_exception_of_the_source_is_its_own(self):
        def broken():
            yield 1
            raise OSError("the disk is gone")

        opened = open_source(broken())
        assert next(opened)[0] == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(opened)


FIRST = {"x": np.zeros((4, 2), np.float32), "n": 3, "y": (np.zeros(4, np.int32),)}


class TestSameKind:
    def test_sizes_and_libraries_may_differ(self):
        other = {"x": jnp.ones((1, 9)), "n": 5, "y": (np.ones(1, np.int32),)}
        check_spec(batch_spec(FIRST), batch_spec(other), 2)

    @pytest.mark.parametrize(
        "change, message",
        [
            (
                {"x": np.zeros((4, 2))},
                r"batch 7, with\n    batch\['x'\]: float32 of rank 2 in the .*, float64 of rank 2",
            ),
            ({"x": np.zeros(4, np.float32)}, r"batch\['x'\]: float32 of rank 2 in the first batch, float32 of rank 1"),
            ({"n": "3"}, r"batch\['n'\]: int in the first batch, str in this one"),
            ({"y": ()}, r"batch\['y'\]\[0\]: int32 of rank 1 in the first batch, absent in this one"),
            ({"z": 1}, r"batch\['z'\]: absent in the first batch, int in this one"),
            ({"y": [np.zeros(4, np.int32)]}, r"batch: PyTreeDef.*\(\*,\).* in the first batch, PyTreeDef.*\[\*\]"),
        ],
    )
    def test_anything_else_is_named(self, change, message):
        with pytest.raises(InputError, match=message):
            check_spec(batch_spec(FIRST), batch_spec({**FIRST, **change}), 7)
