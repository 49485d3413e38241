"""How Sphinx makes the site of what ``stage.py`` has laid out: ``make site``.

Invariant: whoever looks at the site asks no other host for anything, and every link leads somewhere
(``make site`` turns warnings into errors).
"""

from importlib.metadata import version as version_of

project = "batchd"
author = "the batchd maintainers"
copyright = "the batchd maintainers, Apache-2.0"  # noqa: A001  the name is Sphinx's
version = release = version_of("batchd")

extensions = ["myst_parser"]
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
