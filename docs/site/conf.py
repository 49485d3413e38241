"""How Sphinx makes the site of what ``stage.py`` has laid out: ``make site``.

Invariant: the site loads nothing from other hosts, and every link leads somewhere
(``make site`` turns warnings into errors).
"""

from importlib.metadata import version as version_of

from sphinx.ext.autodoc.mock import _MockObject

project = "batchd"
author = "the batchd maintainers"
copyright = "the batchd maintainers, Apache-2.0"  # noqa: A001  the name is Sphinx's
version = release = version_of("batchd")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
copybutton_exclude = ".linenos, .gp, .go"

autodoc_mock_imports = ["torch", "jax", "lightning", "tensorflow", "keras"]
"""The site is made without the frameworks."""
# Sphinx evaluates "torch.Tensor | None".
_MockObject.__or__ = _MockObject.__ror__ = lambda mocked, _other: mocked
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
myst_heading_anchors = 4
# Pages are plain Markdown.
myst_disable_syntax = ["myst_role", "myst_target", "myst_line_comment", "myst_block_break"]

html_theme = "furo"
html_title = f"batchd {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"footer_icons": [], "navigation_with_keys": True}
pygments_style = "tango"
pygments_dark_style = "github-dark"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other projects, which have no page here


def _without_its_own(_app, what, _name, _thing, _options, lines):  # noqa: ANN001, ANN202  Sphinx's
    """Leave out the docstrings of modules: their drawings are for readers of the code."""
    if what == "module":
        lines.clear()


def setup(app):  # noqa: ANN001, ANN201, D103  Sphinx's
    app.connect("autodoc-process-docstring", _without_its_own)
