"""The command ``bass-jax``, one file per subcommand.

Imports every other package; nothing imports it. Start with `main.py`, then `arguments.py` and `output.py`, which the
commands share.
"""
