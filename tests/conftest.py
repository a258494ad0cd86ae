"""Strict: eight devices, no silent promotion of dtypes or ranks, warnings are errors (pyproject.toml)."""

import os
import signal

import jax
import pytest

# XLA reads them when it is first used, not when it is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# On two busy cores, eight devices may keep each other waiting for longer than XLA thinks right.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
# Compiling is most of what the tests do, and for JAX 0.10 half of it is making kernels of fusions in a new way, for
# which XLA still has the old one. ANYBATCH_TESTS_COMPILE=fully has programs compiled as users have them.
if jax.__version_info__ < (0, 11) and os.environ.get("ANYBATCH_TESTS_COMPILE") != "fully":
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# In the background of a shell Ctrl-C is ignored, and then it is by whatever is started from here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["ANYBATCH_CACHE"] = "off"  # what one run measures must not decide what the next one tests

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# One more of its kind each, and among the longest: they run with those behind the marker `slow`, so that CI is short.
LONG = (
    "test_auto.py::test_a_tight_budget_is_kept_and_changes_nothing_but_memory[contrastive-256-infer-jit]",
    "test_demo.py::test_a_run_that_is_stopped_goes_on",
    "test_examples.py::test_digits_spend_what_was_asked_for_and_are_learned",
    "test_examples.py::test_many_processes_stop_together_and_go_on_in_one_with_the_same_bits",
    "test_fit_killed.py::test_twenty_signals_at_random_moments_leave_the_same_bits[1]",
    "test_mesh_parameters.py::test_several_axes_for_the_examples",
    "test_mesh_parameters.py::test_uneven_examples_where_the_model_exchanges_too[2-29]",
    "test_noise_scale.py::test_a_weight_with_a_gradient",
    "test_noise_scale.py::test_aux_and_narrow_parameters",
    "test_per_example.py::test_roundings_that_conspire_do_not_exceed_a_strict_bound",
    "test_per_example_zoo.py::test_norms_and_clipped_sums_of_real_models[gpt_scanned]",
    "test_per_example_zoo.py::test_norms_and_clipped_sums_of_real_models[lstm_of_unequal_lengths]",
    "test_per_example_zoo.py::test_norms_and_clipped_sums_of_real_models[mixture_of_experts]",
    "test_per_example_zoo.py::test_norms_and_clipped_sums_of_real_models[nnx_model]",
    "test_plan.py::test_the_chosen_plan_never_exceeds_its_budget[contrastive-256-0.1]",
    "test_privacy.py::test_noise_is_the_same_on_any_number_of_devices[False]",
    "test_privacy.py::test_steps_over_a_mesh[False]",
    "test_privacy_accounting.py::test_noise_is_the_published_one[0.001-25-6-3.20956502598]",
    "test_privacy_accounting.py::test_what_is_calibrated_stays_within_its_budget[4.0-pld]",
    "test_reading_fuzz.py::test_random_programs[1]",
    "test_reading_fuzz.py::test_random_programs[2]",
    "test_reading_fuzz.py::test_random_programs[3]",
    "test_reading_fuzz.py::test_random_programs_over_a_mesh[3]",
    "test_remat.py::test_blocks_of_real_models_give_the_same_gradient[gpt_scanned]",
    "test_zoo.py::test_value_aux_and_gradient_are_those_of_the_full_batch[bert]",
    "test_zoo.py::test_value_aux_and_gradient_are_those_of_the_full_batch[lstm_of_unequal_lengths]",
    "test_zoo.py::test_value_aux_and_gradient_are_those_of_the_full_batch[resnet_with_batch_norm]",
    "test_zoo.py::test_value_aux_and_gradient_are_those_of_the_full_batch[vision_transformer]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.endswith(LONG):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def forgetful():
    """What JAX has compiled for one file of tests is of no use to the next, and fills the memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def float64():
    """Runs a test in double precision, where an exact method shows errors of 1e-15 and a wrong one does not."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def model_defaults(float64):
    """Models are written for JAX's own promotion of dtypes and ranks, not for the strict one of our tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
