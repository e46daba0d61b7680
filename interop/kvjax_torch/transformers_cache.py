"""`KvjaxCache`: kvjax's paged cache, in any of its dtypes, for models of Hugging Face transformers."""

from kvjax_torch.transformers.cache import CACHE_ARGUMENT as CACHE_ARGUMENT
from kvjax_torch.transformers.cache import KvjaxCache as KvjaxCache
from kvjax_torch.transformers.cache import KvjaxLayer as KvjaxLayer
