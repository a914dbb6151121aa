"""Settings of the site that `make docs` builds into build/site: the Markdown pages of the repository, unchanged.

Read by Sphinx only. The front page is README.md. The list of pages at the side is made from its section "Read on": a
page that is not named there fails the build, as a dead link does. Files that pages link to are copied.
"""

import re
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.application import Sphinx

project = "Step Engine"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md"]
exclude_patterns = ["build", ".venv", "runs"]
myst_heading_anchors = 4  # as GitHub makes them
html_theme = "furo"
html_title = "Step Engine"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def add_list_of_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to the front page what it links to in "Read on", by its headings, as Sphinx's list of pages."""
    if page != root_doc:
        return
    _, _, read_on = source[0].partition("## Read on\n")
    for heading, text in re.findall(r"^\*\*(.+?)\*\*\n(.*?)(?=^\*\*|\Z)", read_on, re.MULTILINE | re.DOTALL):
        pages = dict.fromkeys(re.findall(r"\]\(([\w/.-]+)\.md\)", text))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(pages) + "\n```\n"


def unlink_folders(app: Sphinx, tree: nodes.document) -> None:
    """Leave only the words of a link to a folder, which GitHub shows and a site does not have."""
    for link in list(tree.findall(addnodes.pending_xref)):
        if (Path(tree["source"]).parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def open_front_page(app: Sphinx, failed: Exception | None) -> None:
    """Write the index.html that a server and a browser look for first."""
    page = f'<!doctype html><title>{project}</title><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
    (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.add_lexer("mermaid", TextLexer)  # GitHub draws these diagrams; here they are text, and nothing is loaded
    app.connect("source-read", add_list_of_pages)
    app.connect("doctree-read", unlink_folders)
    app.connect("build-finished", open_front_page)
