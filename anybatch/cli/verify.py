"""`anybatch verify`: prints how every strategy's gradient compares with that of the full batch."""

from typing import Any

from anybatch.cli.problem import load_problem
from anybatch.cli.spinner import spinner
from anybatch.verification.verify import verify


def verify_problem(target: str, **options: Any) -> bool:
    """Prints the comparison for a problem. Returns True if all gradients agree.

    Args:
      target: the problem, as `load_problem` takes it.
      **options: of `anybatch.verify`.
    """
    loss, params, batch = load_problem(target)
    with spinner("Comparing"):
        verification = verify(loss, params, batch, **options)
    print(verification)
    return verification.ok
