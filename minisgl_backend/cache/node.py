"""One run of pages in the radix tree, and how runs of tokens are compared.

Where it stands in the flow: the parts that `cache/radix.py` builds the tree from; nothing else makes them.
"""

from __future__ import annotations

from array import array

from minisgl_backend.messages.ids import StepId

TOKEN_BYTES = 4
"""Keys are packed int32 tokens, as they came in `Sequence.prompt`: runs are compared by memcmp, not token by token."""


class RadixNode:
    """An edge of the tree with what hangs below it. Owned by the tree; sequences point to it and never change it.

    A root stands for its namespace and has no pages. `locks` counts the sequences that use the node's pages: a node
    is locked with all nodes above it, so what is below an unlocked one is unlocked too.
    """

    __slots__ = ("children", "key", "locks", "namespace", "number", "pages", "parent", "step")

    def __init__(self, parent: RadixNode | None, key: bytearray, pages: array[int], step: StepId) -> None:
        self.parent = parent  # None: a root, or a node that was evicted
        self.key = key  # tokens of `pages`, whole pages; grows and shrinks in place
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}  # by the tokens of their first page
        self.locks = 0
        self.step = step  # the last step that names one of the pages; its result may not be here yet
        self.number = 0  # 1, 2, 3 … in the order in which the tree made them; of a root 0
        self.namespace: bytes | int = b""  # of a root; a number: hidden from whoever looks for a prefix


def shared_bytes(key: bytes, at: int, edge: bytearray, unit: int, most: int) -> int:
    """How many bytes of `edge` stand in `key` from `at` on: a multiple of `unit`, at most `most`.

    Halves the doubtful part again and again: the whole costs about two comparisons of the run, in C.
    """
    same, doubtful = 0, most // unit
    while doubtful:
        half = (doubtful + 1) // 2
        start = same * unit
        if key.startswith(edge[start : start + half * unit], at + start):
            same += half
            doubtful -= half
        else:
            doubtful = half - 1
    return same * unit
