"""Assigns the blocks of paged caches to sequences: reference counts, prefix caching, eviction.

Host-side bookkeeping of block numbers and token ids, without arrays of keys and values or devices. As in vLLM's block
pool, a block has a reference count, a full one a hash chained from its parent's, and free blocks are reused in
the order of last use.
"""

from kvjax.block_pool.core import FREED_BLOCK as FREED_BLOCK
from kvjax.block_pool.hashes import HASH_BYTES as HASH_BYTES
from kvjax.block_pool.hashes import HASH_VERSION as HASH_VERSION
from kvjax.block_pool.host import Swaps as Swaps
from kvjax.block_pool.pool import BlockPool as BlockPool
from kvjax.block_pool.sequence import PagedSequence as PagedSequence
from kvjax.block_pool.store import MAX_SLOTS as MAX_SLOTS
from kvjax.block_pool.store import AllBlocksCleared as AllBlocksCleared
from kvjax.block_pool.store import BlockEvent as BlockEvent
from kvjax.block_pool.store import BlockRemoved as BlockRemoved
from kvjax.block_pool.store import BlockStored as BlockStored
