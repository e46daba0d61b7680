"""`python -m kvjax` is the `kvjax` command."""

from __future__ import annotations

import sys

from kvjax.cli import main

sys.exit(main())
