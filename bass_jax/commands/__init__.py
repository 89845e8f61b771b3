"""One file per subcommand of ``bass-jax``."""
