"""Configuration of the documentation site: `make docs` builds it into build/docs, for reading without a network."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

from fedslr import __version__  # noqa: E402 - the path comes first

project = "fedslr"
author = "the fedslr authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "generated",
    "mathml",
]
exclude_patterns = ["_ext", "tutorials", "generated/tutorials/*.py"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

nitpicky = True
# There are no inventories of other projects, because the site is built without a network.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|np|numpy|nn|Tensor|pathlib|collections|contextlib|typing|Path|pandas|matplotlib|DataFrame|Figure)(\..*)?",
    ),
    (
        "py:.*",
        r"(Any|Callable|Iterable|Iterator|Mapping|Sequence|Server|Client|Ledger|[A-Z]|Tree|Model|Carry|Item|Amount)",
    ),
    ("py:class", r"fedslr\.[a-z_]+\..*"),
]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
toc_object_entries = False
python_use_unqualified_type_names = True

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "generated/tutorials",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 60,
    "remove_config_comments": True,
    "image_scrapers": ("matplotlib",),
    "capture_repr": (),
}

copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"fedslr {release}"
html_static_path = ["_static"]
html_css_files = ["fedslr.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "tango"
