"""Builds tiny models of each of transformers' causal language models and writes docs/models.md, which compares their
caches with what kvjax reads of their configurations.

    JAX_PLATFORMS=cpu .venv/bin/python tools/check_models.py

Takes minutes, without network. `make test-all` makes the same comparison (tests/test_model_types.py).
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"


def main() -> None:
    """Rewrites the table in docs/models.md."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    warnings.simplefilter("ignore")
    import tiny_models
    import transformers

    transformers.logging.set_verbosity_error()
    rows = [
        f"transformers {transformers.__version__}:",
        "",
        "| model type | kvjax | tiny models' caches, or why |",
        "| --- | --- | --- |",
    ]
    for model_type in sorted(tiny_models.CAUSAL_MODEL_TYPES):
        rows.append(f"| `{model_type}` | {tiny_models.judge(model_type)} |")
        print(rows[-1], flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{chr(10).join(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
