"""Settings of the site: `scripts/docs.sh` builds it.

The source of the site is the whole repository, so that a link from one page to
another, or to an experiment's page, is the same there and on the site.
"""

import os
import pathlib
import sys
import tomllib

_DOCS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_DOCS / "_ext"), str(_DOCS.parent)]
_PROJECT = tomllib.loads((_DOCS.parent / "pyproject.toml").read_text())

project = "jdist"
author = "the authors of jdist"
project_copyright = author
extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.doctest",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_design",
  "sphinxcontrib.katex",
  "site_pages",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "experiments/*/*.md", "CHANGELOG.md"]
exclude_patterns = ["docs/_*", "build", ".*", "jdist", "runs", "tests"]
# Links from names in annotations to the pages of other projects need their
# inventories; `JDIST_INTERSPHINX=0` builds without a network.
if os.environ.get("JDIST_INTERSPHINX", "1") != "0":
  extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
  "python": ("https://docs.python.org/3", None),
  "numpy": ("https://numpy.org/doc/stable", None),
  "jax": ("https://docs.jax.dev/en/latest", None),
  "optax": ("https://optax.readthedocs.io/en/latest", None),
  "flax": ("https://flax.readthedocs.io/en/latest", None),
}

# Notebooks are Markdown with code cells. They run in every build, each in an
# empty directory, and an error ends the build.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # Seconds for a cell.
nb_execution_show_tb = True
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = [
  # Tables of experiments are reached from their pages.
  "toc.not_included",
  # Parts of other pages are included below headings of their own.
  "myst.header",
  # Notebooks that are not run have no kernel, which names their language.
  "myst-nb.lexer",
]

napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 76
default_role = "name"
nitpicky = True
add_module_names = False
toc_object_entries = False

# The browser draws equations as MathML, from a script of the site: no font and
# no style comes from another host.
katex_css_path = "katex-math.css"
katex_options = "output: 'mathml', throwOnError: true"

html_theme = "sphinx_book_theme"
# Blocks without a language are commands and drawings, which Python's colours
# would make unreadable.
highlight_language = "text"
html_title = "jdist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]
templates_path = ["_templates"]
# The pages keep the folders of the repository; the root leads to the first one.
html_additional_pages = {"index": "forward.html"}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
  "navbar_persistent": [],
  "show_toc_level": 2,
  "use_download_button": False,
  "use_fullscreen_button": False,
  "pygments_light_style": "a11y-light",
  "pygments_dark_style": "a11y-dark",
}
