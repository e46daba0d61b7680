"""What the pages for newcomers show is so: the example runs, tables are what they stand for, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.layers import LAYERS, TORCH_LAYERS

import kvjax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the README's example leaves behind."""
    [source] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec"), names)
    return names


def test_the_example_stores_what_it_says(example):
    assert [cache.spec.dtype.value for cache in example["caches"]] == ["bfloat16", "nvfp4"]
    for cache in example["caches"]:
        pages = np.asarray(cache.kv.reshape(64, -1).view(jnp.uint8))
        assert np.flatnonzero(pages.any(axis=1)).tolist() == [3, 4]


def test_the_example_reads_what_it_wrote(example):
    for written, read in [(example["key"], example["keys"]), (example["value"], example["values"])]:
        assert read.shape == (1, 32, 8, 128)
        np.testing.assert_array_equal(np.asarray(read[0, 20:], np.float32), 0)
        # e2m1 is off by at most a sixth of a block's largest element, which here is under 5.
        np.testing.assert_allclose(
            np.asarray(read[0, :20], np.float32), np.asarray(written, np.float32), rtol=0, atol=5 / 6
        )
    exact, _ = kvjax.gather_kv(example["caches"][0], example["block_table"], example["seq_lens"])
    np.testing.assert_array_equal(np.asarray(exact[0, :20]), np.asarray(example["key"]))


def test_the_examples_attention_is_that_of_what_it_reads(example):
    query, keys, values = (
        np.asarray(array, np.float64) for array in (example["query"][-1], example["keys"][0], example["values"][0])
    )
    logits = np.einsum("hd,thd->ht", query, keys[:20]) / np.sqrt(128)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values[:20])
    # Rounded to bfloat16 on the way out, and twice more where the arrays above were.
    np.testing.assert_allclose(np.asarray(example["attended"][0], np.float64), expected, atol=0.03)


def test_the_demos_table_has_every_dtype_at_its_price():
    [table] = re.findall(r"<!-- demo: begin -->\n(.*?)\n\n", README, re.DOTALL)
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    assert header == [
        *("dtype", "bytes/token", "tokens/GiB", "bits/byte", "greedy agreement", "largest attention error"),
        "write us/token",
    ]
    # The demo's model: four layers of two KV heads of 64.
    for row, dtype in zip(rows, kvjax.STORED_KV_CACHE_DTYPES, strict=True):
        layers = [kvjax.FullAttentionSpec(16, 2, 64, dtype=dtype)] * 4
        priced = sum(spec.bytes_per_token for spec in layers), kvjax.max_tokens(layers, 2**30)
        assert row[:3] == [dtype.value, *(f"{number:,}" for number in priced)]


def test_the_attention_table_has_the_published_times():
    page = (ROOT / "docs/notes/benchmarks-attention.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    header, _, *lines = cells
    rows = {row["dtype"]: row for line in lines if (row := dict(zip(header, line, strict=True)))["row"] == "64x8192"}
    published = [
        float(rows[dtype][column]) for column in ("us", "its us") for dtype in ("nvfp4", "fp8_e4m3", "bfloat16")
    ]
    [table] = re.findall(r"<!-- attention: begin -->\n(.*?)<!-- attention: end -->", README, re.DOTALL)
    assert re.findall(r"\| (\d+) \| [\d,]+ \|", table) == [f"{us:.0f}" for us in published]


def test_the_index_names_every_page():
    docs = ROOT / "docs"
    links = {(docs / link).resolve() for link in re.findall(r"\]\(([^)#]+)", (docs / "README.md").read_text())}
    assert {*docs.rglob("*.md")} - {docs / "README.md"} <= links


PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "benchmarks", "docs", "docs/notes")
    for path in (ROOT / folder).glob("*.md")
)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str):
    lost = []
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        target = (ROOT / page).parent / link if link else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            lost.append((link, anchor))
    assert lost == []


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_map_of_imports_is_the_one_that_is_tested():
    """WORKSPACE.md's lists of modules are those of the layering test, in its order."""
    section = (ROOT / "WORKSPACE.md").read_text().split("## What may import what")[1].split("\n## ")[0]
    listed = re.findall(r"^- (`[\w`, ]+`):", section, re.MULTILINE)
    assert tuple(re.findall(r"\w+", " ".join(listed))) == LAYERS + TORCH_LAYERS
