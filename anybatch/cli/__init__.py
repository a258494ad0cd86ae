"""The command `anybatch`.

Open `main.py` first: it declares the arguments of every command, and `learn.py` those of `anybatch learn`. The others
do the work of the commands. They are imported when a command runs, so that `anybatch --help` imports no JAX.
"""

# A problem, as the help of `explain` and `verify` shows it.
EXAMPLE = """\
# train.py
import jax.numpy as jnp
def problem():
    loss = lambda w, batch: jnp.mean(jnp.tanh(batch @ w) ** 2)
    return loss, jnp.ones((256, 1024)), jnp.ones((4096, 256))"""

# A problem with a loop to check, as the help of `audit` shows it.
AUDIT_EXAMPLE = """\
# train.py
import jax, jax.numpy as jnp
def problem():
    loss = lambda w, batch: jnp.mean(jnp.tanh(batch @ w) ** 2)
    grad = jax.grad(loss)
    loop = lambda w, batch: sum(grad(w, part) for part in batch.reshape(4, 8, 8)) / 4
    return loop, loss, jnp.ones((8, 16)), jnp.ones((32, 8))"""

# package -> (the extra that installs it, what it is for)
EXTRAS = {
    "optax": ("train", "optimizers"),
    "flax": ("train", "models"),
    "orbax-checkpoint": ("train", "checkpoints"),
    "dp-accounting": ("privacy", "privacy accounting"),
    "typer": ("cli", "the command line"),
    "rich": ("cli", "tables and progress bars"),
    "matplotlib": ("cli", "plots"),
    "jinja2": ("cli", "reports"),
    "nicegui": ("learn", "anybatch learn --web"),
}
