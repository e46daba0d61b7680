"""Builds tiny models of each of transformers' causal language models and writes docs/notes/models.md, which compares
their caches with what kvjax reads of their configurations.

    JAX_PLATFORMS=cpu .venv/bin/python tools/check_models.py

Takes minutes, without network. `make test-all` makes the same comparison (tests/test_model_types.py).
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/notes/models.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"


def main() -> None:
    """Rewrites the table in docs/notes/models.md."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    warnings.simplefilter("ignore")
    import transformers
    from support import tiny_models

    transformers.logging.set_verbosity_error()
    verdicts = {}
    for model_type in sorted(tiny_models.CAUSAL_MODEL_TYPES):
        verdicts[model_type] = str(tiny_models.judge(model_type))
        print(model_type, verdicts[model_type], flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}transformers {transformers.__version__}:\n\n{table(verdicts)}{END}{after}")


def table(verdicts: dict[str, str]) -> str:
    """A row for each verdict, with the model types that have it; the most common first."""
    types: dict[str, list[str]] = {}
    for model_type, verdict in verdicts.items():
        types.setdefault(verdict, []).append(f"`{model_type}`")
    rows = ["| kvjax | tiny models' caches, or why | model types |", "| --- | --- | --- |"]
    rows += [f"| {verdict} | {' '.join(types[verdict])} |" for verdict in sorted(types, key=lambda v: -len(types[v]))]
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
