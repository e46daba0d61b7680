"""The table of what `benchmarks.accuracy` measured. It defines no flags, so `tools/update_readme.py` makes it too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.demo.divergence import Summary
from kvjax.table import markdown_table

COLUMNS = ("dtype", "bits", "position", "divergence", "greedy agreement", "perplexity", "recall divergence", "recalled")


@dataclasses.dataclass(frozen=True)
class Row:
    """A dtype's results from a first position; `recall` is of the second time that words are given."""

    dtype: str
    bits: float
    position: int
    text: Summary
    recall: Summary

    def cells(self) -> tuple[str, ...]:
        return (
            self.dtype,
            f"{self.bits:.2f}",
            f"{self.position:,}",
            divergence(self.text),
            f"{self.text.agreement:.1%}",
            f"{self.text.perplexity:.2f}",
            divergence(self.recall),
            f"{self.recall.accuracy:.1%}",
        )


def divergence(summary: Summary) -> str:
    """Returns a mean and its standard error, in 1e-3 nats."""
    return f"{summary.kl * 1e3:.2f} ± {summary.kl_error * 1e3:.2f}"


def as_markdown(document: Mapping[str, Any]) -> str:
    """Returns the table and what it is of, from what `--json` wrote."""
    where = document["environment"]
    rows = [
        Row(**row | {name: Summary(**row[name]) for name in ("text", "recall")}).cells() for row in document["rows"]
    ]
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "jax", "kvjax", "commit", "date"))
    facts = (
        f"`{where['command']}` with {where['model']} on {where['device']}: {versions}. {document['texts']} texts and"
        f" {document['lists']} lists of {document['tokens']} tokens. Standard errors are over texts and over lists, of"
        " a single one over its positions."
    )
    return f"{markdown_table(COLUMNS, rows)}\n\n{facts}"
