"""How the documentation is built: pages in Markdown, the API from the compiled modules themselves."""

import os
import subprocess
import sys
from pathlib import Path

# Autodoc would read the .pyi beside a compiled module, which has no docstrings.
os.environ["SPHINX_AUTODOC_IGNORE_NATIVE_MODULE_TYPE_STUBS"] = "1"

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import kvcache

project = "kvcache"
author = "The kvcache founders"
project_copyright = "the kvcache founders"
release = kvcache.__version__
version = release.partition("+")[0]

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "generated",
    "stubs",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_ext", "_templates"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

html_theme = "furo"
html_title = f"kvcache {version}"
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
# The site has a folder for each release. Without git or tags, as in an sdist, the pages have no list.
_LIST = ["git", "tag", "--list", "v*", "--sort=-version:refname"]
try:
    tags = subprocess.run(_LIST, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.split()
except OSError:
    tags = []
html_context = {"releases": [tag.removeprefix("v") for tag in tags]}
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["custom.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

autodoc_typehints = "description"
autodoc_typehints_format = "short"
# Names in annotations may be private or of third parties, without a page. References in text are {py:obj}: checked.
nitpick_ignore_regex = [("py:class", ".*"), ("py:data", r"typing\..*")]
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# Docstrings put parameters, fields and states in single backticks, as they read in a terminal.
default_role = "code"


def setup(app):
    """Leave compiled modules, which have no Python source, out of the index of sources."""

    def drop_compiled(app):
        modules = getattr(app.env, "_viewcode_modules", {})
        for name in [name for name, entry in modules.items() if entry is False]:
            del modules[name]
        return []

    app.connect("html-collect-pages", drop_compiled, priority=1)
