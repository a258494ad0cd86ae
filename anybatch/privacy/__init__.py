"""Private training: DP-SGD on top of `ab.clipped_grad`, with a guarantee that is written down.

**The contract.** Let the batches of a run be those of `privacy.poisson_batches`, and the steps those of
`privacy.dp_sgd`, or of `privacy.private_grad` with an optimizer that sees the data through it alone. Then the
parameters and optimizer states after all steps, all of them together, are (epsilon, delta)-differentially private:
for two datasets of which one has one example more, and every set of outcomes, the probabilities differ by no more than
`P <= exp(epsilon) P' + delta`. `privacy.epsilon` gives the epsilon for a delta.

It rests on three things:

1. *Sensitivity.* The gradient before noise is the sum over the batch of `g_i * min(1, clip_norm / |g_i|)`, divided by
   `expected_batch_size`, a constant. An example whose gradient is not finite counts for nothing, and so does padding,
   which every batch must declare (`privacy.PaddedBatch`). Adding or removing an example changes the result by at most
   `clip_norm / expected_batch_size` in its norm, whatever the other examples are.
2. *Noise.* To each number of it independent Gaussian noise is added, with the standard deviation `noise_multiplier`
   times that sensitivity: once in a step, after the sum over microbatches and devices, before it is rounded to narrow
   dtypes.
3. *Sampling and accounting.* Each example is in each batch with the probability `expected_batch_size / num_examples`,
   independently of everything else. The composition of such steps is accounted for by the library dp-accounting.

**It is assumed** that the loss of an example depends on that example, the parameters and public things alone; that the
keys are secret, random and used for nothing else; that every step that was taken is accounted for, those of runs that
were thrown away too if something was learned from them; that one person's data is one example (else the guarantee is
for one example of theirs); and that the number of examples is public: it sets the sampling rate.

**It does not cover**

- values, norms, aux and anything else that is computed from the data without noise: printing the training loss is a
  release, and so is stopping early by it;
- the choice of hyperparameters by looking at the private data, over several runs;
- batches from a shuffle, or of a fixed size: these are no Poisson samples, and the epsilon is not theirs;
- attacks on arithmetic: sums and noise are floating-point numbers, rounding is not accounted for, and the least bits of
  a result may tell more than real numbers would. The noise is the sum of four draws, so that its tails do not end
  where a dataset could be told by it; that is a precaution, and no proof;
- attacks on the generator: JAX's keys have 64 bits and its generators were not made for cryptography;
- how long a step takes, or that an example made the program fail;
- datasets in which an example is replaced: for these the sensitivity is twice as large.
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
