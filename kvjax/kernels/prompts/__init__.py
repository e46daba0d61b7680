"""The prompt kernel: attention of long query chunks over tiles of keys and values, on Hopper's tensor cores.

Two warpgroups take 64 query rows of a head each and take turns, so that one computes its softmax while the other
multiplies, as in FlashAttention-3 (https://arxiv.org/abs/2407.08608). Where a KV head has an even number of query
heads, the two take neighbouring heads of the same rows; otherwise the same head of neighbouring rows. The turns also
order reads of shared memory and the copies that replace what was read; the second warpgroup issues these copies. (A
third warpgroup for copies would leave each thread 168 registers, because ptxas ignores `setmaxnreg` here.)

Each multiprocessor gets one thread block, which takes one item after another: rows of heads, the longest work of a
prompt first. Before it is done with an item it claims the next one from a queue that all blocks
share. The ring of tiles is not drained between items: while a block multiplies the last tiles of an item, it copies the
first ones of the next, and it loads the next query rows while it stores results.

Rows of a sequence are consecutive rows of the query. Results are stored in place, in rows of the same index; the rows
of other sequences are not touched. A row sees the tokens up to its position, within its window, except those whose bias
is -inf. Only tiles that some row does not see as a whole are masked. After its tiles, an item may take tiles of near
tokens, which are those of an exact window; pages hold them rounded. A row sees the last near tokens up to its own.
"""

from kvjax.kernels.prompts import fp8 as fp8
from kvjax.kernels.prompts.any_prompts import PromptKind as PromptKind
from kvjax.kernels.prompts.arrays import LotPages as LotPages
from kvjax.kernels.prompts.arrays import PromptRows as PromptRows
from kvjax.kernels.prompts.arrays import attend as attend
from kvjax.kernels.prompts.arrays import found_of as found_of
from kvjax.kernels.prompts.arrays import gather as gather
from kvjax.kernels.prompts.launch import attend_dense as attend_dense
from kvjax.kernels.prompts.operands import RaggedOperands as RaggedOperands
from kvjax.kernels.prompts.problem import ALIGNMENT as ALIGNMENT
from kvjax.kernels.prompts.problem import MAX_HEAD_SIZE as MAX_HEAD_SIZE
from kvjax.kernels.prompts.problem import ROWS as ROWS
from kvjax.kernels.prompts.problem import TOKENS as TOKENS
from kvjax.kernels.prompts.problem import PromptConfig as PromptConfig
from kvjax.kernels.prompts.problem import PromptProblem as PromptProblem
from kvjax.kernels.prompts.problem import choose as choose
from kvjax.kernels.prompts.problem import dense_dtype as dense_dtype
from kvjax.kernels.prompts.problem import why_not as why_not
from kvjax.kernels.prompts.transfer import LEFT as LEFT
from kvjax.kernels.prompts.transfer import join as join
