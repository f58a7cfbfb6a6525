"""Edits of a config.json by dotted path."""

from __future__ import annotations

import json

import pytest

from collapse.config_paths import with_edits
from collapse.errors import PlanError

CONFIG = {"b": 1, "part": {"kinds": ["x", "y"]}}


def test_fields_and_places_are_set_and_the_given_config_is_left_alone():
    edited = with_edits(CONFIG, {"part.kinds.1": "z", "part.new": None, "b": 2})
    assert edited == {"b": 2, "part": {"kinds": ["x", "z"], "new": None}}
    assert CONFIG == {"b": 1, "part": {"kinds": ["x", "y"]}}


def test_the_bytes_do_not_depend_on_the_order_of_an_edits_fields():
    one, other = {"rope": {"type": "x", "theta": 1}}, {"rope": {"theta": 1, "type": "x"}}
    assert json.dumps(with_edits(CONFIG, one)) == json.dumps(with_edits(CONFIG, other))


@pytest.mark.parametrize("path", ["missing.field", "part.kinds.2", "part.kinds.x", "b.field"])
def test_a_path_that_leads_nowhere_is_an_error(path):
    with pytest.raises(PlanError, match=f"config.json has no {path}"):
        with_edits(CONFIG, {path: 1})
