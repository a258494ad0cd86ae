import pathlib
import sys

import anybatch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from inventories import link_names, write_inventories

project = "anybatch"
author = copyright = "The anybatch authors"
release = anybatch.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}  # the pages of the reference are written as .rst
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
pygments_dark_style = "monokai"  # the default underlines names of modules
html_title = "anybatch"
html_static_path = ["_static"]
html_css_files = ["anybatch.css"]

# The tutorials are notebooks: they run when the documentation is built, and a cell that fails ends the build.
nb_execution_mode = "cache"
nb_execution_cache_path = str(pathlib.Path(__file__).parent / "_build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

# The reference has one page for each public name, made from its docstring.
autosummary_generate = True
autosummary_generate_overwrite = True
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
default_role = "code"
napoleon_use_rtype = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Links to other projects: the few names that these pages mention, so that building needs no network.
intersphinx_mapping = write_inventories(pathlib.Path(__file__).parent / "_build" / "inventories")


def setup(app):
    app.connect("doctree-read", link_names)
