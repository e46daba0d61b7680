"""What deprecated names of other packages the tests find in kvjax, and in nobody else's code."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.transformers_models import make_model  # noqa: E402

from kvjax_torch.transformers_cache import CACHE_ARGUMENT  # noqa: E402


class Model(torch.nn.Module):
    """Its `forward` is deprecated."""

    def forward(self) -> None:
        warnings.warn("forward is deprecated", FutureWarning, stacklevel=2)


def test_a_deprecated_argument_of_a_model_is_an_error():
    with pytest.raises(FutureWarning, match="forward is deprecated"):
        Model()()


def test_a_deprecated_name_that_another_package_uses_is_its_own():
    of_another: dict[str, Any] = {"__name__": "another", "call": Model()}
    with pytest.warns(FutureWarning, match="forward is deprecated"):
        exec("call()", of_another)
    of_another["call"] = lambda: None
    code = "def use(): logging.getLogger('transformers.test').warning('a deprecated name')"
    exec(code, {"__name__": "transformers.models"} | {"logging": logging}, of_another)
    of_another["use"]()


@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="in this transformers the name is not deprecated")
def test_the_old_names_of_a_cache_are_errors():
    model, ids = make_model("cpu"), torch.ones((1, 3), dtype=torch.int64)
    with torch.no_grad(), pytest.raises(FutureWarning, match="past_key_values"):
        model(ids, past_key_values=transformers.DynamicCache())
    logging.Logger.warning_once.cache_clear()  # another test may have read it
    with torch.no_grad(), pytest.raises(FutureWarning, match="past_key_values"):
        _ = model(ids).past_key_values
