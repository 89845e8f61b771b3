"""``python -m bass_jax`` is the command ``bass-jax``."""

import sys

from bass_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
