"""Patches: what they change, where, that they refuse to change nothing, and that everything is as before afterwards."""

from __future__ import annotations

import pytest
import torch

import reference.attention
import reference.model
import reference.norm
import reference.parallel
import reference.quantize
import reference.rotary
from conformance.faults.patches import ChangesNothing, Edit, Replace, patched
from reference.compressor import Compressor
from reference.config import Config

ROW = torch.full((1, 32), 3.0, dtype=torch.bfloat16)


def test_an_edit_changes_a_function_in_every_module_that_imported_it() -> None:
    before = reference.norm.rms_norm
    with patched([Edit("norm.rms_norm", "normed * weight", "2.0 * normed * weight")]):
        assert reference.norm.rms_norm is not before
        assert reference.attention.rms_norm is reference.norm.rms_norm
        assert reference.model.rms_norm is reference.norm.rms_norm
        assert reference.norm.rms_norm(ROW, torch.ones(32), 1e-20)[0, 0] == 2.0
    assert reference.norm.rms_norm is before
    assert reference.attention.rms_norm is before
    assert reference.norm.rms_norm(ROW, torch.ones(32), 1e-20)[0, 0] == 1.0


def test_an_edit_of_a_method_changes_the_class() -> None:
    before = Compressor._pool
    with patched([Edit("compressor.Compressor._pool", "start_pos % self.ratio", "0 * start_pos")]):
        assert Compressor._pool is not before
    assert Compressor._pool is before


def test_a_replaced_constant_is_replaced_where_it_was_imported() -> None:
    assert reference.parallel.WEIGHT_TILE == 32
    with patched([Replace("quantize.WEIGHT_TILE", 16)]):
        assert reference.quantize.WEIGHT_TILE == reference.parallel.WEIGHT_TILE == 16
    assert reference.quantize.WEIGHT_TILE == reference.parallel.WEIGHT_TILE == 32


def test_edits_of_one_function_add_up() -> None:
    changes = [
        Edit("norm.rms_norm", "normed * weight", "2.0 * normed * weight"),
        Edit("norm.rms_norm", "2.0 * normed", "4.0 * normed"),
    ]
    with patched(changes):
        assert reference.norm.rms_norm(ROW, torch.ones(32), 1e-20)[0, 0] == 4.0
    assert reference.norm.rms_norm(ROW, torch.ones(32), 1e-20)[0, 0] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        Edit("norm.rms_norm", "no such text", "other text"),
        Edit("norm.rms_norm", "x", "y"),
        Edit("norm.rms_norm", "normed * weight.to(compute)", "(normed * weight.to(compute))"),
        Replace("quantize.WEIGHT_TILE", 32),
    ],
    ids=["absent", "ambiguous", "same-meaning", "same-value"],
)
def test_a_change_that_changes_nothing_is_refused(change: Edit | Replace) -> None:
    before = reference.norm.rms_norm
    with pytest.raises(ChangesNothing), patched([change]):
        pass
    assert reference.norm.rms_norm is before


@pytest.mark.parametrize("target", ["norm.no_such_function", "block.Block.no_such_method", "no_such_module.name"])
def test_a_target_that_does_not_exist_is_refused(target: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)), patched([Replace(target, None)]):
        pass


def test_nothing_is_left_of_a_context_that_could_not_be_entered() -> None:
    changes = [Replace("quantize.WEIGHT_TILE", 16), Edit("norm.rms_norm", "no such text", "")]
    with pytest.raises(ChangesNothing), patched(changes):
        pass
    assert reference.parallel.WEIGHT_TILE == 32


def test_everything_is_restored_after_an_exception() -> None:
    before = reference.norm.rms_norm
    with pytest.raises(RuntimeError), patched([Edit("norm.rms_norm", "normed * weight", "normed / weight")]):
        raise RuntimeError
    assert reference.norm.rms_norm is before
    assert "arithmetic" not in vars(reference.norm)


def test_cached_tables_do_not_outlive_a_change(tiny_reference_config: Config) -> None:
    before = reference.rotary.rotary_frequencies(tiny_reference_config, 0)
    with patched([Edit("rotary.base_frequencies", "1.0 / power", "2.0 / power")]):
        during = reference.rotary.rotary_frequencies(tiny_reference_config, 0)
    after = reference.rotary.rotary_frequencies(tiny_reference_config, 0)
    assert torch.equal(during, 2.0 * before)
    assert torch.equal(after, before)
