"""The command `anybatch`, also `python -m anybatch`."""

import sys

from anybatch.errors import install


def main() -> None:
    """Runs the command line. If one of its packages is missing, says how to install it."""
    try:
        from anybatch.cli import main as cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("anybatch"):
            raise
        sys.exit(f"The command line needs the package {error.name}: {install('cli')}")
    cli.app()


if __name__ == "__main__":
    main()
