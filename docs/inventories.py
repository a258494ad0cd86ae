"""Links from these pages to the documentation of other projects, without a network.

Sphinx finds such links in the inventory that each project publishes. Here the names that anybatch's pages mention are
listed by hand, with the page that documents each; `write_inventories` writes them in the format of an inventory.
"""

import pathlib
import re
import zlib
from typing import Any

from docutils import nodes
from sphinx import addnodes

# project -> (address, {page: names}); a page may contain {name}.
PROJECTS: dict[str, tuple[str, dict[str, str]]] = {
    "jax": (
        "https://docs.jax.dev/en/latest/",
        {
            "_autosummary/{name}.html": """
                jax.Array jax.ShapeDtypeStruct jax.block_until_ready jax.checkpoint jax.custom_jvp jax.custom_vjp
                jax.device_count jax.device_put jax.devices jax.enable_x64 jax.eval_shape jax.grad jax.hessian jax.jit
                jax.jvp jax.linearize jax.make_array_from_process_local_data jax.make_jaxpr jax.make_mesh jax.pmap
                jax.process_count jax.process_index jax.shard_map jax.typeof jax.value_and_grad jax.vjp jax.vmap
                jax.distributed.initialize jax.lax.all_gather jax.lax.cond jax.lax.dynamic_slice jax.lax.fori_loop
                jax.lax.map jax.lax.optimization_barrier jax.lax.pcast jax.lax.pmean jax.lax.psum jax.lax.psum_scatter
                jax.lax.scan jax.lax.stop_gradient jax.lax.while_loop jax.nn.dot_product_attention jax.nn.log_softmax
                jax.nn.logsumexp jax.nn.one_hot jax.nn.relu jax.nn.softmax jax.random.bernoulli jax.random.fold_in
                jax.random.key jax.random.normal jax.random.permutation jax.random.split jax.random.uniform
                jax.tree.flatten jax.tree.leaves jax.tree.map jax.tree.reduce jax.tree.structure jax.tree.unflatten
                jax.numpy.mean jax.numpy.sum jax.numpy.where jax.numpy.sort jax.numpy.argsort
            """,
            "jax.sharding.html": """
                jax.sharding.AxisType jax.sharding.Mesh jax.sharding.NamedSharding jax.sharding.PartitionSpec
                jax.sharding.Sharding
            """,
            "jax.random.html": "jax.random",
            "jax.checkpoint_policies.html": "jax.checkpoint_policies",
        },
    ),
    "optax": (
        "https://optax.readthedocs.io/en/latest/",
        {
            "api/optimizers.html": "optax.adam optax.adamw optax.lamb optax.lion optax.sgd",
            "api/optimizer_wrappers.html": "optax.MultiSteps optax.apply_if_finite optax.lookahead",
            "api/transformations.html": """
                optax.clip_by_global_norm optax.ema optax.add_decayed_weights optax.masked optax.zero_nans
            """,
            "api/combining_optimizers.html": "optax.chain optax.multi_transform optax.partition",
            "api/apply_updates.html": "optax.apply_updates",
            "api/utilities.html": "optax.global_norm",
            "api/losses.html": "optax.softmax_cross_entropy_with_integer_labels optax.softmax_cross_entropy",
            "api/optimizer_schedules.html": "optax.warmup_cosine_decay_schedule optax.cosine_decay_schedule",
        },
    ),
    "flax": (
        "https://flax.readthedocs.io/en/latest/",
        {
            "api_reference/flax.nnx/module.html": "flax.nnx.Module",
            "api_reference/flax.nnx/graph.html": "flax.nnx.split flax.nnx.merge flax.nnx.update flax.nnx.state",
            "api_reference/flax.nnx/nn/normalization.html": "flax.nnx.BatchNorm flax.nnx.LayerNorm flax.nnx.GroupNorm",
            "api_reference/flax.nnx/nn/stochastic.html": "flax.nnx.Dropout",
            "api_reference/flax.nnx/rnglib.html": "flax.nnx.Rngs",
            "api_reference/flax.nnx/training/optimizer.html": "flax.nnx.Optimizer",
            "api_reference/flax.nnx/transforms.html": "flax.nnx.jit flax.nnx.grad flax.nnx.value_and_grad",
            "api_reference/flax.nnx/variables.html": "flax.nnx.Param flax.nnx.BatchStat",
        },
    ),
    "equinox": (
        "https://docs.kidger.site/equinox/",
        {
            "api/module/module/": "equinox.Module",
            "api/manipulation/": "equinox.partition equinox.combine equinox.filter",
            "api/transformations/": "equinox.filter_jit equinox.filter_grad equinox.filter_value_and_grad",
        },
    ),
}
# How names are shortened in the text of the pages.
SHORT = {"ab": "anybatch", "nnx": "flax.nnx", "lax": "jax.lax", "jnp": "jax.numpy", "eqx": "equinox"}
# Equinox's pages name no anchors in Python's fashion: link to the page.
_WITHOUT_ANCHORS = {"equinox", "jax.random", "jax.checkpoint_policies"}


def write_inventories(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Writes one inventory for each project and returns Sphinx's `intersphinx_mapping`."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, (address, pages) in PROJECTS.items():
        lines = []
        for page, names in pages.items():
            for name in names.split():
                anchor = "" if {project, name} & _WITHOUT_ANCHORS else f"#{name}"
                lines.append(f"{name} py:{_role(name)} 1 {page.format(name=name)}{anchor} -\n")
        header = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        header += "# The remainder of this file is compressed using zlib.\n"
        path = folder / f"{project}.inv"
        path.write_bytes(header.encode() + zlib.compress("".join(lines).encode()))
        mapping[project] = (address, str(path))
    return mapping


def _role(name: str) -> str:
    last = name.rpartition(".")[2]
    return "class" if last[0].isupper() else ("module" if name in _WITHOUT_ANCHORS else "function")


def link_names(app: Any, doctree: nodes.document) -> None:
    """Turns names in code style, such as `jax.value_and_grad` or `ab.plan(...)`, into links to what documents them."""
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, (nodes.reference, addnodes.pending_xref, nodes.title)):
            continue
        found = re.fullmatch(r"([a-z]+)((?:\.\w+)+)(\(.*\))?", literal.astext())
        if found is None:
            continue
        target = SHORT.get(found[1], found[1]) + found[2]
        link = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=target, refwarn=False)
        link["refdoc"] = app.env.docname
        literal.replace_self(link)
        link += literal
