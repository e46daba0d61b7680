"""Layers take part in one step at a time, and a step that stops halfway leaves nothing to later ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvjax import KVCacheValueError  # noqa: E402
from kvjax_torch.transformers.block_table import AppendStep, BlockTable  # noqa: E402
from kvjax_torch.transformers.steps import Steps  # noqa: E402

CPU = torch.device("cpu")
LEFT, RIGHT = (np.array([mask, [1, 1, 1]], np.bool_) for mask in ([0, 1, 1], [1, 1, 0]))


class Layers:
    """Three layers, the first with a window, and a pool of numbers in place of tokens for each."""

    def __init__(self, num_blocks: int = 20, block_size: int = 2):
        windowed = BlockTable(num_blocks, block_size, sliding_window=4)
        full = BlockTable(num_blocks, block_size)
        self.tables = [windowed, full, full]
        self.steps = Steps(self.tables, "cache")
        self.steps.pages = [torch.full((num_blocks, block_size), -1) for _ in self.tables]

    def write(self, layer: int, numbers: Sequence[Sequence[int]], is_token: np.ndarray | None = None) -> AppendStep:
        """One layer's part of a step, which appends these numbers to each sequence."""
        new = torch.tensor(numbers)
        step = self.steps.join(layer, *new.shape, CPU, is_token=is_token)
        stored = step.slot_mapping >= 0
        self.steps.pages[layer].view(-1)[step.slot_mapping[stored]] = new.flatten()[stored]
        self.steps.leave(layer, new.shape[1])
        return step

    def write_all(self, numbers: Sequence[Sequence[int]], is_token: np.ndarray | None = None) -> None:
        for layer in range(3):
            self.write(layer, numbers, is_token)

    def held(self, layer: int) -> list[list[int]]:
        """The numbers of each sequence, without padding."""
        step = self.steps.join(layer, self.steps.num_seqs, 0, CPU)
        rows = self.steps.pages[layer][self.tables[layer].rows().astype(np.int64)].flatten(1)
        return [row[:length].tolist() for row, length in zip(rows, step.seq_lens.tolist(), strict=True)]


def test_layers_with_the_same_window_share_the_step_of_all():
    layers = Layers()
    first, second, third = (layers.write(layer, [[1, 2, 3], [4, 5, 6]]) for layer in range(3))
    assert second is third is not first
    assert layers.write(0, [[7], [8]]) is not first


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("restarted", [0, 1, 2])
def test_a_batch_of_the_same_shape_does_not_get_the_padding_of_one_that_failed(failed: int, restarted: int):
    """Whichever layer failed, and whichever begins the next step."""
    layers = Layers()
    layers.steps.join(failed, 2, 3, CPU, is_token=LEFT)  # and nothing is stored
    order = [restarted, *({0, 1, 2} - {restarted})]
    for layer in order:
        step = layers.write(layer, [[1, 2, 3], [4, 5, 6]], RIGHT)
        assert (step.slot_mapping.numpy() >= 0).tolist() == RIGHT.ravel().tolist()
    for layer in order:
        step = layers.write(layer, [[7], [8]], np.array([[1, 1, 0, 1], [1] * 4], np.bool_))
        assert step.seq_lens.tolist() == [3, 4]


def test_masks_of_two_kinds_of_layers_are_one_if_they_are_equal():
    layers = Layers()
    first = layers.write(0, [[1, 2, 3], [4, 5, 6]], LEFT)
    others = [layers.write(layer, [[1, 2, 3], [4, 5, 6]], LEFT.copy()) for layer in (1, 2)]
    assert others[0] is others[1]
    assert first.slot_mapping.tolist() == others[0].slot_mapping.tolist()
    assert layers.steps.lengths == [3, 3, 3]


@pytest.mark.parametrize("num_stored", [1, 2])
def test_layers_of_different_lengths_do_not_go_on_until_the_step_is_taken_back(num_stored: int):
    layers = Layers()
    layers.write_all([[1, 2, 3]])
    for layer in range(num_stored):
        layers.write(layer, [[10, 11]])
    pages = [page.clone() for page in layers.steps.pages]
    message = (
        "cache: got layers of 3 to 5 tokens, expected equally long ones: a step stopped halfway; cache.crop(-2) removes"
    )
    for numbers in ([[10, 11]], [[12]]):
        with pytest.raises(KVCacheValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
            layers.write(0, numbers)
    assert all(torch.equal(now, before) for now, before in zip(layers.steps.pages, pages, strict=True))
    layers.steps.keep(3)
    layers.write_all([[20, 21]])
    assert [layers.held(layer) for layer in range(3)] == [[[1, 2, 3, 20, 21]]] * 3
    layers.write(0, [[30]])
    layers.steps.keep(0)
    layers.write_all([[40, 41]])
    assert [layers.held(layer) for layer in range(3)] == [[[40, 41]]] * 3


class NoMemory(torch.Tensor):
    """Pages that a device has no memory to copy in."""

    def __setitem__(self, *_: object) -> None:
        raise MemoryError


@pytest.mark.parametrize("out_of_memory", [True, False])
@pytest.mark.parametrize("change", ["none", "cut", "select"])
def test_shared_blocks_are_copied_in_every_layer_though_the_step_failed(out_of_memory: bool, change: str):
    """Beams that part: the failed step gave them blocks of their own, which no layer may take for filled."""
    layers = Layers()
    layers.write_all([[1, 2, 3]])
    layers.steps.select(np.array([0, 0, 0]))
    if out_of_memory:
        pages, layers.steps.pages[1] = layers.steps.pages[1], layers.steps.pages[1].as_subclass(NoMemory)
        with pytest.raises(MemoryError):
            layers.steps.join(0, 3, 1, CPU)
        layers.steps.pages[1] = pages
    else:
        layers.steps.join(0, 3, 1, CPU)
    rows = [0, 1, 2]
    if change == "cut":
        layers.steps.keep(3)
    elif change == "select":
        rows = [2, 2, 1]
        layers.steps.select(np.array(rows))
    layers.write_all([[7], [8], [9]])
    assert [layers.held(layer) for layer in range(3)] == [[[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 9]]] * 3


def test_a_step_that_one_window_has_no_blocks_for_changes_no_layer():
    layers = Layers()
    layers.tables[1] = layers.tables[2] = BlockTable(2, 2)
    layers.steps = Steps(layers.tables, "cache")
    layers.steps.pages = [torch.full((20, 2), -1) for _ in range(3)]
    layers.write_all([[1, 2, 3]])
    with pytest.raises(KVCacheValueError, match="num_blocks: got 2 blocks of 2 tokens, expected at least 3"):
        layers.write(0, [[4, 5]])
    assert layers.steps.lengths == [3, 3, 3]
    layers.write_all([[6]])
    assert [layers.held(layer) for layer in range(3)] == [[[1, 2, 3, 6]]] * 3
