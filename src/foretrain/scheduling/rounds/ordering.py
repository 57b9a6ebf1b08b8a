"""Orders the unknowns of a sparse symmetric system by approximate minimum degree, so that elimination stays
sparse.

Amestoy, Davis and Duff, "An approximate minimum degree ordering algorithm", SIAM J. Matrix Anal. Appl. 1996,
with the order among equals of their Algorithm 837 (AMD, ACM TOMS 2004), which solvers use: of unknowns of one
degree the one that was given it last comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

_DENSE, _LEAST_DENSE = 10, 16
"""Unknowns with more neighbours than so many times the root of their number come last."""


def minimum_degree(columns: Sequence[Sequence[int]]) -> list[int]:
    """The order of elimination; ``columns`` has, for each unknown, its neighbours before it, rising.

    >>> minimum_degree([[], [], [], [0, 1, 2]])
    [2, 1, 0, 3]
    """
    quotient = _QuotientGraph(columns)
    while quotient.eliminated < len(columns):
        quotient.eliminate()
    return quotient.order()


class _QuotientGraph:
    """Unknowns that are left, alike ones as one, and elements: what was eliminated, and whom it joined."""

    def __init__(self, columns: Sequence[Sequence[int]]) -> None:
        count = len(columns)
        self.eliminated = 0
        self._variables: list[list[int]] = [[] for _ in columns]
        for column, rows in enumerate(columns):
            for row in rows:
                self._variables[row].append(column)
                self._variables[column].append(row)
        self._elements: list[list[int]] = [[] for _ in columns]
        self._members: dict[int, list[int]] = {}
        """Unknowns that each element joins."""
        self._size = [1] * count
        """Unknowns that one stands for; 0 once another stands for it, negative while it is looked at."""
        self._parent: list[int | None] = [None] * count
        self._front = [0] * count
        """Rows of an element's dense matrix."""
        self._absorbed = [False] * count
        self._degree = [len(each) for each in self._variables]
        self._by_degree: list[dict[int, None]] = [{} for _ in range(count + 1)]
        """The last of each is its first: dictionaries keep their order, and lose an entry at once."""
        self._least = 0
        most = min(count, max(_LEAST_DENSE, int(_DENSE * math.sqrt(count))))
        for number, degree in enumerate(self._degree):
            if degree == 0:
                self._front[number], self._absorbed[number] = 1, True
                self.eliminated += 1
            elif degree > most:
                self._size[number] = 0
                self.eliminated += 1
            else:
                self._by_degree[degree][number] = None

    def eliminate(self) -> None:
        """The next unknown, with those that are eliminated along with it."""
        while not self._by_degree[self._least]:
            self._least += 1
        pivot = next(reversed(self._by_degree[self._least]))
        del self._by_degree[self._least][pivot]
        pivots = self._size[pivot]
        self.eliminated += pivots
        self._size[pivot] = -pivots
        members = self._join(pivot)
        degree = -sum(self._size[each] for each in members)
        self._degree[pivot], self._front[pivot] = degree, pivots + degree
        outside = self._outside(members)
        buckets: dict[int, list[int]] = {}
        for each in members:
            key = self._look_at(each, pivot, outside)
            if key is None:  # has no neighbours left but the pivot's
                degree += self._size[each]
                pivots -= self._size[each]
                self.eliminated -= self._size[each]
                self._parent[each], self._size[each] = pivot, 0
            else:
                buckets.setdefault(key % len(self._size), []).insert(0, each)
        self._degree[pivot] = degree
        first = {each: bucket for bucket in buckets.values() for each in bucket}
        for each in members:
            if self._size[each] < 0 and len(bucket := first[each]) > 1:
                self._merge(bucket)
        self._members[pivot] = self._restore(members, degree)
        self._size[pivot] = pivots
        if not self._members[pivot]:
            self._absorbed[pivot] = True

    def _join(self, pivot: int) -> list[int]:
        """The unknowns that the elimination of one joins, off the lists of degrees; elements end in it."""
        members: list[int] = []
        elements = self._elements[pivot]
        for source in (*(self._members[each] for each in elements), self._variables[pivot]):
            for each in source:
                if self._size[each] > 0:
                    self._size[each] = -self._size[each]
                    self._by_degree[self._degree[each]].pop(each, None)
                    members.append(each)
        for each in elements:
            self._parent[each], self._absorbed[each] = pivot, True
        return members

    def _outside(self, members: Sequence[int]) -> dict[int, int]:
        """How many unknowns of every element next to the members are not among them."""
        outside: dict[int, int] = {}
        for each in members:
            for element in self._elements[each]:
                if not self._absorbed[element]:
                    outside[element] = outside.get(element, self._degree[element]) + self._size[each]
        return outside

    def _look_at(self, number: int, pivot: int, outside: dict[int, int]) -> int | None:
        """Drop what a member no longer has as neighbours, and bound its degree; a key that those alike share,
        None where it has no neighbours left."""
        degree = 0
        elements: list[int] = []
        for element in self._elements[number]:
            if self._absorbed[element]:
                continue
            if outside[element] > 0:
                degree += outside[element]
                elements.append(element)
            else:
                self._parent[element], self._absorbed[element] = pivot, True
        variables = [each for each in self._variables[number] if self._size[each] > 0]
        degree += sum(self._size[each] for each in variables)
        if not degree:
            return None
        self._degree[number] = min(self._degree[number], degree)
        self._elements[number] = [pivot, *elements[1:], *elements[:1]]
        self._variables[number] = [*variables[1:], *variables[:1]]
        return sum(elements) + sum(variables)

    def _merge(self, bucket: list[int]) -> None:
        """Let one stand for those of a bucket with the same neighbours."""
        while len(bucket) > 1:
            first = bucket.pop(0)
            neighbours = self._neighbours(first)
            for each in list(bucket):
                if self._neighbours(each) == neighbours:
                    bucket.remove(each)
                    self._size[first] += self._size[each]
                    self._parent[each], self._size[each] = first, 0

    def _neighbours(self, number: int) -> tuple[frozenset[int], frozenset[int]]:
        return frozenset(self._elements[number]), frozenset(self._variables[number])

    def _restore(self, members: Sequence[int], degree: int) -> list[int]:
        """Put the members that are left back to the lists of degrees."""
        kept = []
        left = len(self._size) - self.eliminated
        for each in members:
            size = -self._size[each]
            if size > 0:
                self._size[each] = size
                bound = min(self._degree[each] + degree - size, left - size)
                self._by_degree[bound][each] = None
                self._degree[each], self._least = bound, min(self._least, bound)
                kept.append(each)
        return kept

    def order(self) -> list[int]:
        """Elements after those that ended in them, each followed by the unknowns that it stands for."""
        count = len(self._size)
        place: list[int] = [0] * count
        following = 0
        for element in self._after_their_children():
            place[element] = following
            following += self._size[element]
        for number in range(count):
            if self._size[number]:
                continue
            holder = self._parent[number]
            while holder is not None and not self._size[holder]:
                holder = self._parent[holder]
            if holder is None:  # put off for its many neighbours
                place[number] = following
                following += 1
            else:
                place[number] = place[holder]
                place[holder] += 1
        return sorted(range(count), key=place.__getitem__)

    def _after_their_children(self) -> Iterator[int]:
        children: dict[int | None, list[int]] = {}
        for number, size in enumerate(self._size):
            if size:
                children.setdefault(self._parent[number], []).append(number)
        for parent, siblings in children.items():
            if parent is not None:  # the largest comes last
                largest = max(reversed(siblings), key=self._front.__getitem__)
                siblings.remove(largest)
                siblings.append(largest)
        waiting = [(root, False) for root in reversed(children.get(None, []))]
        while waiting:
            number, seen = waiting.pop()
            if seen:
                yield number
            else:
                waiting.append((number, True))
                waiting += [(each, False) for each in reversed(children.get(number, []))]
