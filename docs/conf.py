"""Sphinx's settings for the site.

``python tools/make_site.py`` builds it, and puts gpucoll and tools/ on the path.
"""

from __future__ import annotations

from pathlib import Path

import numpydoc.xref
import site_reference

import gpucoll

project = "gpucoll"
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "site_extension",
]
root_doc = "index"
exclude_patterns = ["**/*.txt"]
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # single backticks, which are for parameters, too
    ("py:class", r"(?!gpucoll\.).*"),
    (".*", "(python|numpy):.*"),
]

# --- Markdown -------------------------------------------------------------------------------------

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
highlight_language = "none"

# --- docstrings -----------------------------------------------------------------------------------

autodoc_mock_imports = list(site_reference.MOCKED)
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
add_module_names = False
default_role = "py:obj"
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_aliases = {name: f"gpucoll.{name}" for name in gpucoll.__all__}
numpydoc_xref_ignore = "all"  # every other word
toc_object_entries_show_parents = "hide"
if tags.has("online"):  # type: ignore[name-defined]  # noqa: F821 (Sphinx defines it)
    intersphinx_mapping = {name: (url, None) for name, url in site_reference.ELSEWHERE.items()}
else:
    numpydoc.xref.DEFAULT_LINKS.clear()  # links from int and the like to Python's documentation

# --- looks ----------------------------------------------------------------------------------------

html_theme = "furo"
html_title = "gpucoll"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_search_scorer = str(Path(__file__).with_name("static") / "search_scorer.js")
html_theme_options = {"navigation_with_keys": False}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
