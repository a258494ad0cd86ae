"""`fit` in several processes: all take a step or none does, and each goes on where it stood."""

import pytest
from cases.processes import run

PROBLEM = """
import pathlib, warnings
import anybatch as ab, optax
me = distributed.initialize().index
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
folder = pathlib.Path(sys.argv[0]).parent

def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

def data(count):
    rng = np.random.default_rng(me)
    return {"x": rng.normal(size=(count, 4)).astype(np.float32), "y": rng.normal(size=count).astype(np.float32)}

def fit(batches, **options):
    step = ab.train_step(loss, optax.adam(0.01), mesh=mesh)
    return ab.fit(step, step.init(jnp.ones(4)), batches, progress=False, **options)
"""


@pytest.mark.full
def test_the_run_ends_for_all_when_the_batches_of_one_process_do(tmp_path):
    """Otherwise the others would wait for it without an end."""
    body = """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended = fit(ab.Batches(data(16 + 8 * me), 4), epochs=1, checkpoints=folder / "checkpoints")
    print(ended.steps, [str(each.message) for each in caught])
    """
    for ended in run(PROBLEM + _dedented(body), tmp_path, devices=2):
        assert ended.status == 0, ended.output
        assert "4 ['The batches of process 0 have ended, and the others have more" in ended.output


@pytest.mark.full
def test_each_process_goes_on_where_it_stood(tmp_path):
    """Each has another seed, so that none can go on where another stood."""
    body = """
    def batches():
        return ab.Batches(data(16), 4, seed=me)
    whole = fit(batches(), steps=7)
    fit(batches(), steps=3, checkpoints=folder / "checkpoints")
    rest = fit(batches(), steps=7, checkpoints=folder / "checkpoints")
    same = np.array_equal(whole.state.params, rest.state.params)
    other = np.array_equal(whole.state.params, fit(ab.Batches(data(16), 4), steps=7).state.params)
    print(f"from {rest.resumed_from}, same {same}, with another seed {other}")
    """
    for ended in run(PROBLEM + _dedented(body), tmp_path, devices=2):
        assert ended.status == 0, ended.output
        assert "from 3, same True, with another seed False" in ended.output


def _dedented(text):
    return "\n".join(line[4:] for line in text.split("\n"))
