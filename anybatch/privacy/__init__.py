"""Private training: DP-SGD on top of `ab.clipped_grad`, with a written guarantee.

Open `training.py` first (`dp_sgd`), then `mechanism.py` (`private_grad`: clipping and noise, and the checks that refuse
whatever would void the guarantee). `sampling.py` draws the batches, and `accounting.py` computes epsilon.

**The contract.** Take the batches of a run from `privacy.poisson_batches`. Take its steps by `privacy.dp_sgd`, or by
`privacy.private_grad` and an optimizer that sees the data only through it. Then the parameters and optimizer states
after all steps, all of them together, are (epsilon, delta)-differentially private. That means: for any two datasets
that differ by one added or removed example, and for every set of outcomes, the probabilities `P` and `P'` of that set
satisfy `P <= exp(epsilon) P' + delta`. `privacy.epsilon` returns the epsilon for a delta.

The guarantee rests on three things:

1. *Sensitivity.* The gradient before noise is the sum over the batch of `g_i * min(1, clip_norm / |g_i|)`, divided by
   `expected_batch_size`, a constant. An example whose gradient is not finite counts for nothing, and so does padding,
   which every batch must declare (`privacy.PaddedBatch`). Adding or removing one example changes the result by at most
   `clip_norm / expected_batch_size` in the Euclidean norm, whatever the other examples are.
2. *Noise.* Independent Gaussian noise is added to each entry of the gradient, with a standard deviation of
   `noise_multiplier` times that sensitivity. It is added once in a step, after the sum over microbatches and devices
   and before the gradient is rounded to narrow dtypes.
3. *Sampling and accounting.* Each example is in each batch with the probability `expected_batch_size / num_examples`,
   independently of everything else. The library dp-accounting computes the epsilon of the composition of such steps.

**The guarantee assumes that**

- the loss of an example depends only on that example, the parameters and public values;
- the keys are secret and random, and are used for nothing else;
- every step that was taken is accounted for, including those of discarded runs if something was learned from them;
- one person's data is one example. Otherwise the guarantee is for one example of that person;
- the number of examples is public, since it sets the sampling rate.

**The guarantee does not cover**

- values, norms, aux and anything else that is computed from the data without noise. Printing the training loss is a
  release, and so is stopping early by it;
- the choice of hyperparameters by looking at the private data, over several runs;
- batches from a shuffle, or batches of a fixed size. They are not Poisson samples, and the epsilon does not apply;
- attacks on arithmetic. Sums and noise are floating-point numbers, rounding is not accounted for, and the last bits of
  a result may reveal more than real numbers would. The noise is the sum of four draws, so that its tails do not end
  where that could identify a dataset. This is a precaution, and not a proof;
- attacks on the random number generator. JAX's keys have 64 bits, and its generators were not made for cryptography;
- side channels: how long a step takes, or that an example made the program fail;
- datasets in which one example is replaced by another. For these, the sensitivity is twice as large.
"""

from anybatch.privacy.accounting import epsilon, noise_multiplier
from anybatch.privacy.mechanism import PrivateGrad, private_grad
from anybatch.privacy.noise import add_noise, secret_key
from anybatch.privacy.sampling import Draw, PaddedBatch, PoissonBatches, poisson_batches
from anybatch.privacy.training import DpSgd, Metrics, State, dp_sgd

__all__ = [
    "DpSgd",
    "Draw",
    "Metrics",
    "PaddedBatch",
    "PoissonBatches",
    "PrivateGrad",
    "State",
    "add_noise",
    "dp_sgd",
    "epsilon",
    "noise_multiplier",
    "poisson_batches",
    "private_grad",
    "secret_key",
]
