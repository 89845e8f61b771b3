"""The configuration of the documentation site; ``make docs`` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import bass_jax

project = "bass_jax"
author = copyright = "the bass_jax authors"
version = release = bass_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxarg.ext",
    "autodoc_hooks",
    "config_fields",
    "family_table",
]

highlight_language = "text"
html_theme = "furo"
html_title = f"bass_jax {version}"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Single backticks in docstrings are names: they become links where the site has an entry.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
