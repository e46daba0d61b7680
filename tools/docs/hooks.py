"""Hooks of MkDocs: the pages of the repository and of the public names, links to sources, and a check of every link.

Links to files that are no pages lead to `SOURCE_URL`, such as `https://host/owner/name/blob/main`; by default to the
files themselves, on this machine.
"""

from __future__ import annotations

import functools
import html.parser
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from public_names import MODULES, ROOT, public_names, with_links

SOURCE_URL = os.environ.get("SOURCE_URL", ROOT.as_uri()).rstrip("/")
NOTEBOOK = "examples/tour.ipynb"
FILES = ("*.md", "benchmarks/*.md", "docs/*.md", "docs/notes/*.md", "docs/plots/*.svg")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Gives headings the anchors that GitHub gives them, and public names their place in the navigation."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    named = {module: [{name: page_of(module, name)} for name in names_of(module)] for module in MODULES}
    config.nav.append({"API": [{module: [index_of(module), *pages]} for module, pages in named.items()]})
    return config


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of `docs_dir` by those of the repository, at the same paths, and adds pages for names."""
    found = sorted(str(path.relative_to(ROOT)) for pattern in FILES for path in ROOT.glob(pattern))
    site = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    for path in found:
        site.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    site.append(File.generated(config, page_of_notebook(NOTEBOOK), content=notebook_page()))
    for module in MODULES:
        site.append(File.generated(config, index_of(module), content=index_page(module)))
        for name in names_of(module):
            site.append(File.generated(config, page_of(module, name), content=f"::: {module}.{name}\n"))
    return site


def page_of_notebook(path: str) -> str:
    """The path of a notebook's page; any other path is unchanged."""
    return re.sub(r"\.ipynb$", ".md", path)


def notebook_page() -> str:
    """The notebook's cells, without outputs."""
    cells = json.loads((ROOT / NOTEBOOK).read_text())["cells"]
    sources = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{source}\n```" if is_code else source for source, is_code in sources)


def index_of(module: str) -> str:
    """The path of a module's page."""
    return f"api/{module}/README.md"


def page_of(module: str, name: str) -> str:
    """The path of a name's page."""
    return f"api/{module}/{name}.md"


@functools.cache
def names_of(module: str) -> tuple[str, ...]:
    """What a module exports."""
    return tuple(public_names(MODULES[module].read_text()))


def index_page(module: str) -> str:
    """A table of a module's names with the first sentence of each docstring."""
    members = load(module)
    lines = [f"# {module}", "", members.docstring.value, "", "| name | |", "| --- | --- |"]
    for name in names_of(module):
        if (docstring := members[name].docstring) is None:
            raise Abort(f"{module}.{name} has no docstring")
        summary = docstring.value.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| [`{name}`]({name}.md) | {summary} |")
    return "\n".join(lines)


@functools.cache
def load(module: str) -> griffe.Object:
    """A module as its source says, without importing it."""
    return griffe.load(module, search_paths=[ROOT, ROOT / "interop"])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Removes comments, which Markdown would join with what follows, and links sources, where they are."""
    folder = (ROOT / page.file.src_uri).parent

    def linked(target: str) -> str:
        path = Path(os.path.normpath(folder / target))
        if urlsplit(target).scheme or target.startswith("#") or not path.exists():
            return target  # MkDocs reports a file that is not there
        relative = path.relative_to(ROOT).as_posix()
        return page_of_notebook(target) if page_of_notebook(relative) in files.src_uris else f"{SOURCE_URL}/{relative}"

    return with_links(re.sub(r"^<!--.*?-->$", "", markdown, flags=re.MULTILINE), linked)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuses a site that has a link to a file or a place in one that is not there."""
    site = Path(config.site_dir)
    pages = {path: Links.of(path) for path in sorted(site.rglob("*.html"))}
    lost = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # its links are absolute, from where the site will be
        for link in page.links
        if not leads_somewhere(link, path, pages)
    ]
    if lost:
        raise Abort("links that lead nowhere:\n" + "\n".join(lost))


class Links(html.parser.HTMLParser):
    """The links of a page and the places in it."""

    @classmethod
    def of(cls, path: Path) -> Links:
        """Those of a file."""
        parsed = cls()
        parsed.links, parsed.places = [], {""}
        parsed.feed(path.read_text())
        return parsed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        """Collects `href`, `src`, `id` and `name`."""
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.links.append(value)
            elif key in ("id", "name"):
                self.places.add(value)


def leads_somewhere(link: str, path: Path, pages: dict[Path, Links]) -> bool:
    """Whether a link of a page leads to a file, and to a place in it; those to other hosts are not followed."""
    parts = urlsplit(link)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).exists()
    if parts.scheme or parts.netloc:
        return True
    target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
    if target not in pages:
        return target.exists()
    return unquote(parts.fragment) in pages[target].places
