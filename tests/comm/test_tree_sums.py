"""Laws of sums over trees of regions: who has what, what it hears, and what comes of it."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Condition
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polygon_comm.compression import ErrorFeedback, make_codec
from polygon_comm.members import BACK, ROOTS, Tree, members_of
from polygon_comm.shares import cut_for
from polygon_comm.tree_sums import TreeSum

from polygon.cost.reduction import largest_share
from polygon.domain.runtime import turns_of_region
from tests.nightly import cases
from tests.patience import PATIENCE_S


@st.composite
def drawn_trees(draw, regions):
    """Trees over so many regions, of any depth up to two."""
    weights = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    trees = []
    for weight in weights:
        root = draw(st.integers(0, regions - 1))
        others = [place for place in range(regions) if place != root]
        near = draw(st.sets(st.sampled_from(others), min_size=1))
        parents = [root if place in near else draw(st.sampled_from(sorted(near))) for place in range(regions)]
        parents[root] = -1
        trees.append(Tree(weight / sum(weights), tuple(parents)))
    return tuple(trees)


@st.composite
def drawn_members(draw, codec="none"):
    """Three to five regions with one to four leaders each, and trees over them."""
    counts = draw(st.lists(st.integers(1, 4), min_size=3, max_size=5))
    region_of = dict(enumerate(region for region, count in enumerate(counts) for _ in range(count)))
    nodes = {rank: rank for rank in region_of}
    trees, turns = draw(drawn_trees(len(counts))), partial(turns_of_region, most=draw(st.sampled_from([1, 2, 7])))
    return members_of("test", region_of, region_of, nodes, codec, turns=turns, trees=trees)


def edges(tree):
    """Of each edge: the child, its parent, and which of both deals out what they exchange."""
    for child, parent in enumerate(tree.parents):
        if parent >= 0:
            yield child, parent, parent if tree.depth(parent) == 0 else child


@settings(max_examples=cases(60), deadline=None)
@given(members=drawn_members(), elements=st.integers(0, 5000))
def test_pieces_are_the_vector_once_and_each_tree_has_its_part(members, elements):
    """To an element a border; in each tree leaders of a region have equal parts, to an element a turn."""
    pieces = members.pieces(elements)
    assert [piece.start for piece in pieces] + [elements] == [0] + [piece.stop for piece in pieces]
    assert all(piece.stop > piece.start for piece in pieces)
    for number, tree in enumerate(members.trees):
        of_tree = [piece for piece in pieces if piece.tree == number]
        assert abs(sum(p.stop - p.start for p in of_tree) - tree.part * elements) <= 1 + 1e-6
        assert all(piece.owner == tree.root for piece in of_tree)
        for place, leaders in enumerate(members.leaders):
            turns = 1 if tree.depth(place) % 2 else members.turns[place]
            for leader in leaders:
                led = [piece for piece in of_tree if piece.leaders[place] == leader]
                assert abs(sum(p.stop - p.start for p in led) - tree.part * elements / len(leaders)) <= turns + 1


@settings(max_examples=cases(60), deadline=None)
@given(members=drawn_members())
def test_leaders_share_the_edges_of_trees_as_they_are_priced(members):
    """Two regions exchange the parts of the trees in which one is the other's parent; of that no pair of leaders has
    more than `polygon.cost.sum_trees` has it, whichever of both deals it out, and leaders all the same each way."""
    counts, places = [len(of) for of in members.leaders], range(len(members.regions))
    parts, most = Counter(), Counter()
    for tree in members.trees:
        for child, parent, deals in edges(tree):
            pair, other = frozenset((child, parent)), parent if deals == child else child
            parts[pair] += tree.part
            most[pair] += tree.part * largest_share(counts[deals], counts[other], members.turns[deals])
    place = {leader: place for place, leaders in enumerate(members.leaders) for leader in leaders}
    shared = {}
    for (a, b), part in members.shared.items():
        assert b in members.leader_peers(a) and a in members.leader_peers(b)
        shared.setdefault(frozenset((place[a], place[b])), []).append(part)
    assert shared.keys() == parts.keys()
    for pair, of in shared.items():
        a, b = pair
        assert sum(of) == pytest.approx(parts[pair]) and max(of) <= most[pair] * (1 + 1e-6)
        assert members.pairs_at_once[a, b] == members.pairs_at_once[b, a] >= parts[pair] / most[pair] * (1 - 1e-6)
    firsts = {leaders[0] for leaders in members.leaders}  # who exchange what is small
    assert all(members.leader_peers(first) >= firsts - {first} for first in firsts) and len(firsts) == len(places)


def test_without_trees_and_over_equal_stars_it_is_the_same():
    """But for how equal parts are rounded: of a vector that they divide, pieces and what leaders do with them."""
    region_of = dict(enumerate((0, 0, 1, 2, 2, 2)))
    stars = tuple(Tree(1 / 3, tuple(-1 if place == root else root for place in range(3))) for root in range(3))
    own, given_ = (
        members_of("test", region_of, region_of, {r: r for r in region_of}, turns=lambda *_: 2, trees=trees)
        for trees in ((), stars)
    )
    assert own.pieces(3 << 12) == given_.pieces(3 << 12) and own.shared == pytest.approx(given_.shared)
    assert own.rounds == given_.rounds == 2 and own.leader_pairs == given_.leader_pairs
    assert all(cut_for(own, r, 3 << 12).share == cut_for(given_, r, 3 << 12).share for r in region_of)


@pytest.mark.parametrize(("regions", "codec"), [((0, 0, 1), "int8"), ((0, 1, 2), "powersgd")])
def test_trees_are_nothing_to_two_regions_and_to_what_goes_whole(regions, codec):
    """All give all others what they have."""
    region_of, count = dict(enumerate(regions)), len(set(regions))
    star, chain = Tree(0.75, (-1,) + (0,) * (count - 1)), Tree(0.25, tuple(range(-1, count - 1)))
    own, given_ = (members_of("test", region_of, region_of, codec=codec, trees=trees) for trees in ((), (star, chain)))
    assert own.shared == given_.shared and own.rounds == given_.rounds == 2
    assert all(cut_for(own, rank, 5000).share == cut_for(given_, rank, 5000).share for rank in region_of)


@settings(max_examples=cases(40), deadline=None)
@given(members=drawn_members(), elements=st.integers(1024, 5000))
def test_leaders_agree_on_messages(members, elements):
    """Whatever one sends in a round, of as many numbers, the other hears then; a leader sends up, or has first, all
    that it has, and what it hears in all is what is on the edges of trees at its region, to its part."""
    shares = {rank: cut_for(members, rank, elements).share for rank in members.ranks}
    sent, heard = {}, {}
    for rank, share in shares.items():
        if share is None:
            continue
        for stretch in share.exchanged:
            key, n = (stretch.sent, rank, stretch.peers[0], stretch.tree), stretch.stop - stretch.start
            sent[key] = (n,)
        for block in share.blocks:
            for version in block.versions:
                sent[BACK if block.relayed else ROOTS, rank, version.peer, block.tree] = version.sizes
        for round_, of_peers in enumerate(share.heard):
            for peer, of_trees in of_peers.items():
                heard |= {(round_, peer, rank, tree): sizes for tree, sizes in of_trees.items()}
        whole = sum(s.stop - s.start for s in share.exchanged)
        arrangement = cut_for(members, rank, elements).arrangement
        size = dict(zip(arrangement.holders, arrangement.sizes, strict=True))[rank]
        assert whole + sum(sum(b.sizes) for b in share.blocks if not b.relayed) == size
        assert {b for _, a, b, _ in sent if a == rank} <= members.leader_peers(rank)
    assert sent == heard
    for rank, share in shares.items():
        if share is not None:
            messages = {(r, a, b) for r, a, b, _ in sent if rank in (a, b)}
            assert share.messages == len(messages)
    for place, leaders in enumerate(members.leaders):
        others = [other for other in range(len(members.regions)) if other != place]
        common = [p.stop - p.start for p in members.pieces(elements) for o in others if members.adds(p, place, o)]
        assert sum(sum(sizes) for (_, _, peer, _), sizes in heard.items() if peer in leaders) == sum(common)
    if all(len(of) == 1 for of in members.leaders):  # then pieces stay where they are
        assert all(cut_for(members, rank, elements).arrangement.in_place for rank in members.ranks)


class Box:
    """Messages between threads, by round, sender and receiver."""

    def __init__(self):
        self.sent, self._changed = {}, Condition()

    def send(self, sender, round_, peer, payload):
        """One of its kind."""
        with self._changed:
            assert (round_, sender, peer) not in self.sent
            self.sent[round_, sender, peer] = payload.clone()
            self._changed.notify_all()
        return SimpleNamespace(wait=lambda: None)

    def receive(self, *key):
        """Waits for one."""
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.sent, PATIENCE_S)
            return self.sent[key]


def summed(members, vectors, packer):
    """What regions, which hold a vector each, make of them over trees: by leader its part, and all messages."""
    box, elements = Box(), len(vectors[0])
    place = {rank: place for place, leaders in enumerate(members.leaders) for rank in leaders}

    def run(rank):
        (arrangement, share), vector = cut_for(members, rank, elements), vectors[place[rank]]
        if share is None:
            return None
        part = dict(zip(arrangement.holders, arrangement.of(vector).split(arrangement.sizes), strict=True))[rank]
        receipts = [
            {peer: SimpleNamespace(wait=partial(box.receive, r, peer, rank)) for peer in of}
            for r, of in enumerate(share.heard)
        ]
        packers = [packer(rank, index) for index in range(len(share.exchanged) + share.pieces_summed)]
        leads = TreeSum(part, share, packers, receipts, send=partial(box.send, rank), place=place, rank=rank)
        assert len(leads.rounds) == share.steps
        for round_ in leads.rounds:
            round_()
        return leads.total()

    with ThreadPoolExecutor(len(place)) as threads:
        parts = dict(zip(place, threads.map(run, place), strict=True))
    found = []
    for leaders in members.leaders:
        arrangement = cut_for(members, leaders[0], elements).arrangement
        arranged = torch.cat([parts[holder] for holder in arrangement.holders])
        found.append(arranged.clone())
        arrangement.put_back(arranged, found[-1])
    return found, box.sent


@settings(max_examples=cases(25), deadline=None)
@given(data=st.data(), codec=st.sampled_from(["none", "int8", "topk"]), elements=st.integers(1024, 3000))
def test_all_regions_hold_the_same_sum(data, codec, elements):
    """Bit by bit, of drawn trees; without packing the true one, and packed in all steps together to what about one step
    drops; a leader sends and hears as many messages and bytes as its share says."""
    members, packers = data.draw(drawn_members(codec)), {}

    def packer(*slot):
        return packers.setdefault(slot, ErrorFeedback(make_codec(codec)))

    generator, sums, true = torch.Generator().manual_seed(elements), [], []
    for _ in range(6):
        vectors = [torch.randn(elements, generator=generator) for _ in members.regions]
        found, sent = summed(members, vectors, packer)
        assert all(torch.equal(of, found[0]) for of in found)
        sums.append(found[0])
        true.append(torch.stack(vectors).sum(0))
    if codec == "none":
        assert torch.allclose(torch.stack(sums), torch.stack(true), atol=1e-5)
    else:
        # What is missing of a number is what the regions that packed it on its way, one each, still owe.
        owed = [packed.error.norm() ** 2 for packed in packers.values()]
        missing = torch.stack(true).sum(0) - torch.stack(sums).sum(0)
        assert missing.norm() ** 2 <= len(members.regions) * sum(owed) * (1 + 1e-3) + 1e-6
    messages = Counter(rank for _, *pair in sent for rank in pair)
    for rank in members.ranks:
        share = cut_for(members, rank, elements).share
        if share is not None:
            assert messages[rank] == share.messages
