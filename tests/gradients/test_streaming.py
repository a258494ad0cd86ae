"""A batch that stays on the host has the gradient of the full batch, and few of its chunks are on the device."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.comparing import assert_same
from cases.compilations import counted_compilations
from cases.meshes import mesh_of

import anybatch as ab
from anybatch.call import host_batch
from anybatch.gradients import streaming

pytestmark = pytest.mark.usefixtures("model_defaults")

EXAMPLES = 53


def parameters():
    random = np.random.default_rng(0)
    return {"w": jnp.asarray(random.normal(size=(5, 7))), "v": jnp.asarray(random.normal(size=(7, 3)))}


def examples(number=EXAMPLES):
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(number, 5)),
        "label": random.integers(0, 3, number),
        "mask": (random.random(number) < 0.6).astype(float),
    }


def in_pieces(batch, *stops):
    """A function that returns an iterator of pieces. It writes over its arrays, as some loaders do."""
    number = len(jax.tree.leaves(batch)[0])

    def pieces():
        start, buffer = 0, None
        for stop in (*stops, number):
            piece = jax.tree.map(lambda leaf, start=start, stop=stop: leaf[start:stop].copy(), batch)
            yield piece
            buffer = piece
            for leaf in jax.tree.leaves(buffer):
                leaf[...] = 77
            start = stop

    return ab.HostBatch(pieces, number)


def predict(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) @ params["v"]


def mean(params, batch):
    return jnp.mean(predict(params, batch) ** 2) + 0.1 * jnp.sum(params["w"] ** 2)


def masked(params, batch):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(predict(params, batch)), batch["label"][:, None], axis=1)[:, 0]
    return -jnp.sum(chosen * batch["mask"]) / jnp.sum(batch["mask"])


def root_mean_square(params, batch):
    return jnp.sqrt(jnp.mean(predict(params, batch) ** 2))


def contrastive(params, batch):
    made = predict(params, batch)
    positions = jnp.arange(len(made))
    return -jnp.mean(jax.nn.log_softmax(made @ made.T)[positions, (positions + 1) % len(made)])


def same_label(params, batch):
    """Its head needs the labels of all examples, and not their features."""
    made = predict(params, batch)
    same = batch["label"][:, None] == batch["label"][None]
    return -jnp.sum(jax.nn.log_softmax(made @ made.T) * same) / jnp.sum(same)


def dropout(params, batch):
    kept = jax.random.bernoulli(jax.random.key(0), 0.8, batch["x"].shape)
    return jnp.mean(predict(params, {"x": jnp.where(kept, batch["x"], 0.0)}) ** 2)


def normalised(params, batch):
    hidden = batch["x"] @ params["w"]
    return jnp.mean((((hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 0.1)) @ params["v"]) ** 2)


def two_views(params, batch):
    made = predict(params, {"x": jnp.concatenate([batch["x"], -batch["x"]])})
    one, other = jnp.split(made, 2)
    return jnp.mean(jax.nn.log_softmax(one @ other.T)[jnp.arange(len(one)), jnp.arange(len(one))])


LOSSES = [mean, masked, root_mean_square, contrastive, same_label, dropout, normalised, two_views]


@pytest.mark.every_jax
@pytest.mark.parametrize("size", [1, 8, 200, "auto"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_it_is_the_gradient_of_the_full_batch(loss, size):
    batch = in_pieces(examples(), 10, 11, 40)
    actual = ab.value_and_grad(loss, microbatch_size=size)(parameters(), batch)
    assert_same(actual, jax.value_and_grad(loss)(parameters(), examples()))


def test_the_pieces_matter():
    """The control: a batch without its last piece has another gradient."""
    fewer = jax.tree.map(lambda leaf: leaf[:40], examples())
    one = ab.grad(mean, microbatch_size=8)(parameters(), in_pieces(fewer, 10))
    other = jax.grad(mean)(parameters(), examples())
    assert jnp.abs(one["w"] - other["w"]).max() > 1e-3


def with_aux(params, batch):
    made = predict(params, batch)
    right = jnp.argmax(made, axis=1) == batch["label"]
    return masked(params, batch), {"rows": made, "accuracy": jnp.mean(right), "sorted": jnp.sort(made[:, 0])}


@pytest.mark.parametrize("size", [3, "auto"])
def test_aux_and_further_arguments(size):
    def loss(params, batch, scale, *, shift):
        value, aux = with_aux(params, batch)
        return scale * value + jnp.sum(shift * params["w"]), aux

    fun = ab.value_and_grad(loss, has_aux=True, microbatch_size=size)
    actual = fun(parameters(), in_pieces(examples(), 20), 2.0, shift=jnp.ones(7))
    assert_same(actual, jax.value_and_grad(loss, has_aux=True)(parameters(), examples(), 2.0, shift=jnp.ones(7)))


@pytest.mark.parametrize("size", [3, "auto"])
def test_map_batch_of_a_batch_on_the_host(size):
    actual = ab.map_batch(with_aux, microbatch_size=size)(parameters(), in_pieces(examples(), 20))
    assert_same(actual, with_aux(parameters(), examples()))


def test_products_of_a_batch_on_the_host():
    params, vector = parameters(), jax.tree.map(jnp.cos, parameters())
    expected = jax.jvp(lambda params: jax.grad(masked)(params, examples()), (params,), (vector,))[1]
    assert_same(ab.hvp(masked, microbatch_size=8)(params, in_pieces(examples(), 20), vector=vector), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_declared_reductions(reduction):
    def per_example(params, batch):
        return jnp.sum(predict(params, batch) ** 2, axis=1)

    def loss(params, batch):
        losses = per_example(params, batch)
        weighted = (jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))
        return {"mean": jnp.mean(losses), "sum": jnp.sum(losses), "weighted": weighted}[reduction]

    def plain(params, batch):
        value = loss(params, batch)
        return value[0] / value[1] if reduction == "weighted" else value

    actual = ab.value_and_grad(loss, reduction=reduction, microbatch_size=8)(parameters(), in_pieces(examples(), 20))
    assert_same(actual, jax.value_and_grad(plain)(parameters(), examples()))


def test_large_numpy_arrays_and_files_are_streamed(tmp_path, monkeypatch):
    """If they take more than half of the memory that is left beside the parameters; otherwise they are copied once."""
    batch = examples(4096)
    file = np.memmap(tmp_path / "x", np.float64, "w+", shape=batch["x"].shape)
    file[:] = batch["x"]
    chunks = []
    honest = streaming.in_chunks

    def watched(*args):
        for chunk in honest(*args):
            chunks.append(len(chunk[0]))
            yield chunk

    monkeypatch.setattr(streaming, "in_chunks", watched)
    expected = jax.value_and_grad(masked)(parameters(), batch)
    for x in (batch["x"], np.memmap(tmp_path / "x", np.float64, "r", shape=batch["x"].shape)):
        for size in (64, "auto"):
            chunks.clear()
            fun = ab.value_and_grad(masked, microbatch_size=size, memory="128KiB")
            assert_same(fun(parameters(), batch | {"x": x}), expected)
            assert sum(chunks) == 4096 and len(chunks) >= 8
    chunks.clear()
    assert_same(ab.value_and_grad(masked, microbatch_size=64, memory="1GiB")(parameters(), batch), expected)
    assert not chunks


def test_few_chunks_are_on_the_device():
    """However many there are. The iterator looks at what is on the device when it is asked for the next piece."""
    seen = []

    def pieces():
        for number in range(15):
            seen.append(sum(array.shape == (16, 1000) for array in jax.live_arrays()))
            yield np.full((16, 1000), number, np.float32)

    w = jnp.ones(1000, jnp.float32)
    mapped = ab.map_batch(lambda w, x: jnp.mean(x @ w), microbatch_size=16, memory="2MiB")
    value = mapped(w, ab.HostBatch(pieces, 240))
    np.testing.assert_allclose(value, 1000 * 7, rtol=1e-5)
    assert 1 <= max(seen) <= streaming.IN_FLIGHT


@pytest.mark.parametrize("has_x64", [True, False])
@pytest.mark.parametrize("loss", [masked, contrastive])
def test_large_chunks_are_copied_in_slices(loss, has_x64, monkeypatch):
    """Also where the array on the host has a wider type than on the device. The owner may write over its arrays."""
    copies = []
    honest = streaming._put
    monkeypatch.setattr(streaming, "_put", lambda arrays, device: copies.append(len(arrays)) or honest(arrays, device))
    monkeypatch.setattr(streaming, "SLICE_BYTES", 100)
    batch = examples()
    with jax.enable_x64(has_x64):
        actual = ab.value_and_grad(loss, microbatch_size=17)(parameters(), in_pieces(batch, 17, 30))
        expected = jax.value_and_grad(loss)(parameters(), batch)
    assert max(copies) > len(batch)
    tolerance = 1e-12 if has_x64 else 1e-5
    jax.tree.map(lambda mine, its: np.testing.assert_allclose(mine, its, tolerance, tolerance), actual, expected)


def test_memory_that_runs_out_halves_the_microbatches(monkeypatch):
    honest, failures = streaming._ChunkPass.compute, [1, 2]

    def compute(self):
        if failures:
            failures.pop()
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 88.74GiB.")
        return honest(self)

    monkeypatch.setattr(streaming._ChunkPass, "compute", compute)
    fun = ab.grad(mean)
    with pytest.warns(ab.TightMemoryWarning, match="microbatch_size=8; the gradient is the same"):
        assert_same(fun(parameters(), in_pieces(examples(), 20)), jax.grad(mean)(parameters(), examples()))
    failures.append(1)
    with pytest.raises(jax.errors.JaxRuntimeError):  # an iterator cannot be read again
        fun(parameters(), ab.HostBatch(iter([examples()]), EXAMPLES))


def test_each_choice_of_remat_has_its_own_strategy(monkeypatch):
    used, run = [], streaming._run
    monkeypatch.setattr(streaming, "_run", lambda gradient, strategy: used.append(strategy) or run(gradient, strategy))
    for remat in (None, "dots_saveable", None):
        ab.grad(mean, remat=remat)(parameters(), in_pieces(examples(), 20))
        assert used[-1].remat == remat


def test_it_compiles_once():
    for size in (8, "auto"):
        fun = ab.value_and_grad(masked, microbatch_size=size)
        fun(parameters(), in_pieces(examples(), 20))
        with counted_compilations() as count:
            fun(parameters(), in_pieces(examples(), 13))
        assert count[0] == 0


def test_an_iterator_serves_one_pass_and_no_more():
    number = EXAMPLES
    once = ab.HostBatch(iter([examples()]), number)
    assert_same(ab.grad(mean, microbatch_size=8)(parameters(), once), jax.grad(mean)(parameters(), examples()))
    with pytest.raises(ab.InputError, match=r"an iterator can be read only once.*\n.*lambda: iter"):
        ab.grad(contrastive, microbatch_size=8)(parameters(), ab.HostBatch(iter([examples()]), number))


def test_an_error_of_the_iterator_is_raised_and_its_thread_ends():
    def pieces():
        yield jax.tree.map(lambda leaf: leaf[:20], examples())
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        ab.grad(mean, microbatch_size=4)(parameters(), ab.HostBatch(pieces, EXAMPLES))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("anybatch-stream")]


@pytest.mark.parametrize("number", [52, 54])
def test_a_wrong_number_of_examples_is_refused(number):
    batch = ab.HostBatch(lambda: iter([examples()]), number)
    with pytest.raises(ab.InputError, match=f"num_examples={number} and pieces of"):
        ab.grad(mean, microbatch_size=10)(parameters(), batch)


def test_pieces_of_other_types_are_refused():
    def call(*pieces):
        return ab.grad(mean, microbatch_size=10)(parameters(), ab.HostBatch(list(pieces), 2 * EXAMPLES))

    with pytest.raises(ab.InputError, match=r"piece\['x'\] = float32\[53,5\] in piece 1, where float64\[53,5\]"):
        call(examples(), examples() | {"x": examples()["x"].astype(np.float32)})
    with pytest.raises(ab.InputError, match="piece 1 with piece"):
        call(examples(), {"x": examples()["x"]})
    with pytest.raises(ab.InputError, match=r"piece\['x'\] = 'x'"):
        call({"x": "x"})
    with pytest.raises(ab.InputError, match="at least one piece"):
        call()
    with pytest.raises(ab.InputError, match="a function that returns an iterator"):
        ab.HostBatch(3, 4)
    with pytest.raises(ab.InputError, match="num_examples"):
        ab.HostBatch([], 0)


def test_masked_arrays_are_refused():
    """NumPy would drop the mask, and the hidden numbers would count."""
    x = np.ma.masked_greater(np.arange(12.0).reshape(6, 2), 8)
    for pieces in ([x[:3], x[3:]], [np.ones((3, 2)), x[3:]]):
        with pytest.raises(ab.InputError, match=r"x\.filled\(0\)"):
            ab.grad(lambda w, x: jnp.mean(x @ w), microbatch_size=2)(jnp.ones(2), ab.HostBatch(pieces, 6))


def test_an_interrupted_call_takes_no_more_pieces():
    """A chunk may have many pieces. After an error or Ctrl-C, the thread ends with the current one."""
    taken, stop = [], threading.Event()

    def pieces():
        for number in range(1000):
            taken.append(number)
            if number == 35:
                stop.wait(10)
            yield np.ones((1, 2), np.float32)

    chunks = streaming.in_chunks([ab.HostBatch(pieces, 1000).rows()], 10, {}, stop.is_set)
    on_device = streaming._transferred(chunks, [8], None, stop)
    assert next(on_device)[0] == 10
    on_device.close()  # as an error in the loop over it does
    assert len(taken) <= 36
    assert next(chunks, None) is None


def spread_of_sizes(params, batch):
    return jnp.std(jnp.sum(predict(params, batch) ** 2, axis=1))  # two passes


def sorted_scores(params, batch):
    """Labels in the order of scores: the labels are read in full, and then the batch in a pass."""
    scores = jnp.sum(predict(params, batch), axis=1)
    return jnp.cumsum(batch["mask"][jnp.argsort(scores)])


@pytest.mark.parametrize("change", ["order of rows", "order of pieces", "numbers"])
@pytest.mark.parametrize("use", ["gradient", "map_batch"])
def test_passes_that_would_read_different_pieces_are_refused(use, change):
    """As with a loader that shuffles, or draws other noise, whenever it is iterated over."""
    batch, generator = examples(60), np.random.default_rng(0)

    def pieces():
        rows = np.arange(60).reshape(3, 20)
        rows = generator.permutation(60).reshape(3, 20) if change == "order of rows" else rows
        rows = rows[generator.permutation(3)] if change == "order of pieces" else rows
        for part in rows:
            piece = jax.tree.map(lambda leaf, part=part: leaf[part], batch)
            yield piece | ({"x": piece["x"] + generator.normal()} if change == "numbers" else {})

    fun = ab.value_and_grad if use == "gradient" else ab.map_batch
    fun = fun(spread_of_sizes if use == "gradient" else sorted_scores, microbatch_size=8)
    with pytest.raises(ab.InputError, match="same pieces in the same order") as caught:
        for _ in range(3):  # pieces may be in the same order by chance
            fun(parameters(), ab.HostBatch(pieces, 60))
    assert "piece" in caught.value.given and "seed=epoch" in caught.value.remedy
    # One pass, or one order for all passes of a call, is right. Another call may have another one.
    if change != "numbers":
        one_pass = ab.value_and_grad(mean, microbatch_size=8)(parameters(), ab.HostBatch(pieces, 60))
        assert_same(one_pass, jax.value_and_grad(mean)(parameters(), batch))
    for _ in range(2):
        kept = list(pieces())
        fun(parameters(), ab.HostBatch(lambda kept=kept: iter(kept), 60))


def test_rows_of_large_pieces_that_change_places_are_noticed():
    """A checksum of some elements sees each column, however the number of columns divides their distance."""
    for columns in (1, 4, 27, 96, 1024):
        rows = 16 * 2**16 // columns
        piece = np.zeros((rows, columns), np.uint8)
        piece[:, -1] = np.random.default_rng(0).integers(0, 255, rows)
        assert host_batch._checksum([piece]) == host_batch._checksum([piece.copy()])
        assert host_batch._checksum([piece]) != host_batch._checksum([piece[::-1]])
        assert host_batch._checksum([piece]) != host_batch._checksum([np.roll(piece, 1, axis=0)])


def test_where_it_cannot_be_streamed():
    batch = in_pieces(examples(), 20)
    with pytest.raises(ab.InputError, match="without mesh="):
        ab.grad(mean, microbatch_size=8, mesh=mesh_of(2))(parameters(), batch)
    with pytest.raises(ab.InputError, match="outside jit"):
        jax.jit(lambda params: ab.grad(mean, microbatch_size=8)(params, batch))(parameters())


def test_a_loss_that_needs_all_rows_of_a_large_array_is_refused():
    def loss(params, batch):
        return mean(params, {"x": batch["x"] - jnp.median(batch["x"], axis=0)})

    with pytest.raises(ab.HeadTooLargeError, match=r"all examples of an array of the batch at once: float64\[4096,5\]"):
        ab.grad(loss, microbatch_size=8, memory="200KiB")(parameters(), examples(4096))


def random_rows(params, batch, keys):
    return jax.vmap(lambda x, key: x + jax.random.normal(key, x.shape))(batch["x"], keys)


def beside(params, batch, more):
    made = predict(params, batch)
    return {"both": made * more["x"][:, :3], "median": jnp.median(more["x"], axis=0), "last": more["label"][::-1]}


@pytest.mark.parametrize("size", [1, 8, "auto"])
def test_part_of_the_batch_may_be_on_the_device(size):
    """Keys, too, of which NumPy has no arrays."""
    keys, more = jax.random.split(jax.random.key(0), EXAMPLES), jax.tree.map(jnp.asarray, examples())
    for fun, other in ((random_rows, keys), (beside, more)):
        mapped = ab.map_batch(fun, batch_argnums=(1, 2), microbatch_size=size)
        actual = mapped(parameters(), in_pieces(examples(), 20), other)
        assert_same(actual, fun(parameters(), examples(), other))


def test_chunks_are_on_the_default_device():
    with jax.default_device(jax.devices()[1]):
        mapped = ab.map_batch(lambda params, batch: (2 * batch["x"], jnp.sum(batch["x"])), microbatch_size=8)
        rows, total = mapped(parameters(), in_pieces(examples(), 20))
    assert rows.devices() == total.devices() == {jax.devices()[1]}
    assert_same(rows, jnp.asarray(2 * examples()["x"]))


def test_a_host_batch_that_is_not_the_batch_is_refused():
    def loss(params, batch, more):
        return mean(params, batch) * jnp.sum(more["x"])

    with pytest.raises(ab.InputError, match=r"more\['label'\], which is a HostBatch.*\n.*batch_argnums=\(1, 2\)"):
        ab.grad(loss, microbatch_size=8)(parameters(), examples(), in_pieces(examples(), 20))


@pytest.mark.parametrize("dtype", [object, "U1", "M8[s]", ">f8", [("a", "f4")]])
def test_pieces_without_numbers_are_refused(dtype):
    piece = examples() | {"more": np.zeros(EXAMPLES, dtype)}
    with pytest.raises(ab.InputError, match=r"NumPy array of numbers.*\n?.*piece\['more'\] = .*\[53\]"):
        ab.map_batch(predict, microbatch_size=8)(parameters(), ab.HostBatch([piece], EXAMPLES))


@pytest.mark.parametrize("pieces", [np.ones((3, 1)), {"x": np.ones((3, 1))}, "abc"], ids=["array", "dict", "text"])
def test_a_batch_in_place_of_its_pieces_is_refused(pieces):
    """The rows of an array would be taken for pieces, each with as many examples as it has columns."""
    with pytest.raises(ab.InputError, match="a function that returns an iterator, or a list"):
        ab.HostBatch(pieces, 3)
    with pytest.raises(ab.InputError, match=r"piece = \{\}"):
        ab.grad(mean)(parameters(), ab.HostBatch([{}], 3))


def test_types_for_reading_and_planning():
    batch = in_pieces(examples(), 20)
    assert batch.types["x"] == jax.ShapeDtypeStruct((EXAMPLES, 5), np.float64)
    assert ab.read(mean, parameters(), batch).separable
    with pytest.raises(ab.InputError, match="A HostBatch is for"):
        ab.verify(mean, parameters(), batch)


def test_an_nnx_model():
    nnx = pytest.importorskip("flax.nnx")
    model, x = nnx.Linear(5, 3, rngs=nnx.Rngs(0)), examples()["x"].astype(np.float32)

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    one = ab.grad(loss, microbatch_size=8)(model, ab.HostBatch([x[:20], x[20:]], EXAMPLES))
    assert_same(jax.tree.leaves(one), jax.tree.leaves(nnx.grad(loss)(model, x)), rtol=1e-5, atol=1e-6)


def test_a_plan_shows_that_the_batch_stays_on_the_host():
    batch = examples(4096)
    plan = ab.plan(masked, parameters(), batch, memory="128KiB")
    assert plan.chosen.route == "from the host" and plan.chosen.fits and plan.chosen.total <= 128 * 1024
    assert "The batch stays on the host" in str(plan)
    assert ab.plan(masked, parameters(), ab.HostBatch([batch], 4096), memory="128KiB").chosen == plan.chosen
    assert ab.plan(ab.map_batch(masked), parameters(), batch, memory="128KiB").noun == "result"
    with pytest.raises(ab.NothingFitsError, match="even 1 example at a time needs"):
        ab.plan(masked, parameters(), batch, memory="1KiB")
    with pytest.raises(ab.NothingFitsError, match="even 1 example at a time needs"):
        ab.grad(masked, memory="1KiB")(parameters(), batch)
    assert ab.explain(masked, parameters(), batch, memory="1KiB").chosen is None
    assert ab.plan(masked, parameters(), batch, memory="1GiB", timed=False).chosen.route == "full batch"


@pytest.mark.parametrize("size", [53, 100, "auto", 8])
def test_rows_of_aux_if_one_microbatch_has_all_examples(size):
    def loss(params, batch):
        losses = jnp.sum(predict(params, batch) ** 2, axis=1)
        return jnp.mean(losses), {"rows": losses, "mean": jnp.mean(losses)}

    options = {"has_aux": True, "reduction": "mean", "aux_reduction": {"rows": None, "mean": "mean"}}
    fun = ab.value_and_grad(loss, **options, microbatch_size=size)
    expected = jax.value_and_grad(loss, has_aux=True)(parameters(), examples())
    assert_same(fun(parameters(), in_pieces(examples(), 20)), expected)


def test_results_that_depend_on_the_microbatches_need_their_size():
    def loss(params, batch, key):
        return jnp.mean(predict(params, batch) ** 2 * jax.random.bernoulli(key)), jnp.zeros(())

    given = (parameters(), in_pieces(examples(), 20), jax.random.key(0))
    for options in ({"rng_argnums": 2, "aux_reduction": "mean"}, {"aux_reduction": "stack"}):
        fun = ab.value_and_grad(loss, has_aux=True, reduction="mean", microbatch_size=None, **options)
        with pytest.raises(ab.InputError, match="a batch on the host is never in one piece"):
            fun(*given)


def test_other_arguments_on_several_devices(monkeypatch):
    """A NumPy batch is copied in full then, as on a mesh. A HostBatch is refused."""
    batch, mesh = examples(4096), mesh_of(2)
    replicated = jax.device_put(parameters(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    actual = ab.value_and_grad(mean, microbatch_size=64, memory="1MiB")(replicated, batch)
    assert_same(jax.device_get(actual), jax.value_and_grad(mean)(parameters(), batch))
    with pytest.raises(ab.InputError, match="must be on one device"):
        ab.grad(mean, microbatch_size=64)(replicated, in_pieces(batch, 100))
    # Arrays that JAX moves by itself may be elsewhere.
    second = jax.device_put(parameters(), jax.devices()[1])
    fun = ab.grad(lambda params, x, scale: mean(params, {"x": x * scale[:, None]}), batch_argnums=(1, 2))
    x, scale = examples()["x"], jnp.linspace(0, 1, EXAMPLES)
    actual = fun(second, ab.HostBatch([x[:20], x[20:]], EXAMPLES), scale)
    assert_same(jax.device_get(actual), jax.grad(mean)(parameters(), {"x": x * np.asarray(scale)[:, None]}))


def test_a_piece_without_examples_is_refused():
    with pytest.raises(ab.InputError, match="in piece 1"):
        ab.grad(lambda w, x: jnp.mean(w * x), microbatch_size=2)(
            jnp.ones(()), ab.HostBatch([np.ones(3), np.array(1.0)], 4)
        )
