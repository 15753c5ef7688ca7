"""Slurm's lists of nodes."""

from __future__ import annotations

import itertools

import pytest

from gpucoll.rendezvous.slurm_nodes import node_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", "login"),
        ("a,b,c", "a b c"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[01-04,07],login", "node01 node02 node03 node04 node07 login"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("n[099-101,5]", "n099 n100 n101 n5"),
        ("gpu-[1-2]-[0-1]", "gpu-1-0 gpu-1-1 gpu-2-0 gpu-2-1"),
        ("rack[1,3]node[02]-ib", "rack1node02-ib rack3node02-ib"),
        ("[1-2],x[3]", "1 2 x3"),
        ("a.example.org,b-[1].example.org", "a.example.org b-1.example.org"),
    ],
)
def test_lists(text, names):
    assert list(node_names(text)) == names.split()


def test_a_long_list_is_not_made_for_its_first_name():
    names = node_names("n[000000-999999]x[0-999999]")

    assert list(itertools.islice(names, 2)) == ["n000000x0", "n000000x1"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no node name begins at character 1"),
        ("a,", "no node name begins at character 3"),
        ("a,,b", "no node name begins at character 3"),
        ("a b", "character 2 is ' ', not a comma"),
        ("n[1-2", "character 2 is '\\[', not a comma"),
        ("n1]", "character 3 is ']', not a comma"),
        ("n[]", "'' is no range of numbers"),
        ("n[1-]", "'1-' is no range"),
        ("n[a-b]", "'a-b' is no range"),
        ("n[3-1]", "the range '3-1' ends before it begins"),
    ],
)
def test_what_is_none(text, why):
    with pytest.raises(ValueError, match=why):
        list(node_names(text))
