import anybatch

project = "anybatch"
author = copyright = "The anybatch authors"
release = anybatch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "anybatch"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"
napoleon_use_rtype = False
