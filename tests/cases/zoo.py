"""One table of real models, small in width only. A new row inherits every test that is parametrized by it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from cases import zoo_fields as fields
from cases import zoo_libraries as libraries
from cases import zoo_text as text
from cases import zoo_vision as vision


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its loss, and what a reading of that loss must say.

    Attributes:
        name: Of the test.
        make: Gives (loss, params, batch, rest) for a number of examples; `loss(params, batch, *rest)` is a scalar, or
            a scalar and aux.
        passes: Over the batch, that the gradient needs: two where its coefficients depend on the whole batch.
        has_aux: As in `jax.value_and_grad`.
        stochastic: Whether random numbers are drawn.
        requires: A module that the tests can do without.
    """

    name: str
    make: Callable[[int], tuple]
    passes: int
    has_aux: bool = False
    stochastic: bool = False
    requires: str | None = None

    def problem(self, num_examples: int = 6) -> tuple[Callable[..., Any], tuple]:
        """The loss, and all of its arguments."""
        loss, params, batch, rest = self.make(num_examples)
        return loss, (params, batch, *rest)


ZOO = [
    Case("resnet_with_group_norm", vision.resnet_with_group_norm, passes=1),
    Case("resnet_with_batch_norm", vision.resnet_with_batch_norm, passes=2, has_aux=True),
    Case("vision_transformer", vision.vision_transformer, passes=1, has_aux=True),
    Case("unet_diffusion", vision.unet_diffusion, passes=1, stochastic=True),
    Case("unet_segmentation", vision.unet_segmentation, passes=2, has_aux=True),
    Case("variational_autoencoder", vision.variational_autoencoder, passes=1, has_aux=True, stochastic=True),
    Case("gpt_unrolled", text.gpt_unrolled, passes=1),
    Case("gpt_scanned", text.gpt_scanned, passes=1, has_aux=True),
    Case("bert", text.bert, passes=1, has_aux=True),
    Case("transformer_with_dropout", text.transformer_with_dropout, passes=1, has_aux=True, stochastic=True),
    Case("lstm_of_unequal_lengths", text.lstm_of_unequal_lengths, passes=1),
    Case("recurrence_over_time", text.recurrence_over_time, passes=1),
    Case("mixture_of_experts", text.mixture_of_experts, passes=2, has_aux=True),
    Case("fourier_network", text.fourier_network, passes=1),
    Case("graph_network", fields.graph_network, passes=1, has_aux=True),
    Case("two_towers", fields.two_towers, passes=2, has_aux=True),
    Case("q_learning", fields.q_learning, passes=1, has_aux=True),
    Case("proximal_policy", fields.proximal_policy, passes=1, has_aux=True),
    Case("advantage_actor_critic", fields.advantage_actor_critic, passes=2),
    Case("gaussian_likelihood", fields.gaussian_likelihood, passes=1, has_aux=True),
    Case("nnx_model", libraries.nnx_model, passes=1, has_aux=True),
    Case("nnx_model_with_dropout", libraries.nnx_model_with_dropout, passes=1, has_aux=True, stochastic=True),
    Case("nnx_model_with_batch_norm", libraries.nnx_model_with_batch_norm, passes=2, has_aux=True),
    Case("equinox_model", libraries.equinox_model, passes=1, has_aux=True),
    Case("equinox_model_with_dropout", libraries.equinox_model_with_dropout, passes=1, stochastic=True),
    Case("haiku_model", libraries.haiku_model, passes=1, stochastic=True, requires="haiku"),
]
