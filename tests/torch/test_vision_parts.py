"""Tests of runtime/vision/ that need no second process. Needs torch and Transformers.

Of runtime/vision/ (apply, callback, control, exchange, gradients, heartbeat, inputs, outputs, pooled)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from refusals import refused

pytest.importorskip("transformers", minversion="5", reason="holds the models that functions are made in")

from trimtab.errors import TrimtabError
from trimtab.runtime.vision import apply as callback
from trimtab.runtime.vision.agreement import differing_ranks, fingerprint
from trimtab.runtime.vision.exchange import lay_out_rows, zigzag_rows
from trimtab.runtime.vision.hooks import KINDS, Heartbeat
from trimtab.runtime.vision.inputs import (
    BatchFamily,
    GridFamily,
    VisionInputs,
    VisionPart,
    join_inputs,
    read_features,
    touch,
    write_features,
)
from trimtab.vision import encode_pooled, share_images


def inputs_of(rows: list[int]) -> VisionInputs:
    counts = np.array(rows)
    return VisionInputs(
        parts=(VisionPart(name="pixels", rows=torch.arange(counts.sum() * 4.0).view(-1, 1), lengths=counts * 4),),
        patches=counts * 4,
        entries=np.ones(len(rows), np.int64),
        rows=counts,
    )


def test_a_layout_finds_every_row():
    rng = np.random.default_rng(0)
    for num_ranks in (1, 3, 5):
        num_rows = rng.integers(0, 6, 11)
        shares = share_images(rng.random(11), num_ranks)
        layout = lay_out_rows(shares.order, shares.offsets, num_rows)
        ids = np.arange(num_rows.sum())
        of_atom = np.split(ids, np.cumsum(num_rows)[:-1])
        made = [
            np.concatenate([of_atom[i] for i in shares.atoms_of(r)] or [ids[:0]]).astype(int) for r in range(num_ranks)
        ]
        assert layout.counts.tolist() == [len(rows) for rows in made]
        assert [made[r][p] for r, p in zip(layout.owner, layout.position, strict=True)] == ids.tolist()


def test_zigzag_rows_are_those_of_the_pieces_that_a_rank_holds():
    rng = np.random.default_rng(0)
    for num_ranks in (1, 2, 4):
        lengths = [2 * num_ranks * int(n) for n in rng.integers(1, 6, 5)]
        image = rng.random(sum(lengths)) < 0.4
        wanted = zigzag_rows(image, lengths, num_ranks)
        # by the pieces as hosts stack them: rank r has piece r and the r-th from the end of every document
        starts = np.cumsum([0, *lengths[:-1]])
        for rank, rows in enumerate(wanted):
            pieces = [
                np.split(start + np.arange(length), 2 * num_ranks)[place]
                for start, length in zip(starts, lengths, strict=True)
                for place in (rank, 2 * num_ranks - 1 - rank)
            ]
            held = np.sort(np.concatenate(pieces))
            assert rows.tolist() == (np.cumsum(image) - 1)[held[image[held]]].tolist()


@pytest.mark.parametrize("kind", ["tensor", "tuple"])
def test_outputs_of_the_tower_of_transformers_4(kind):
    inputs = inputs_of([2, 1, 3])
    rows, deep = torch.randn(6, 4), [torch.randn(6, 4), torch.randn(6, 4)]
    output = rows if kind == "tensor" else (rows, deep)
    features = read_features(output, inputs)
    assert features.num_rows.tolist() == [2, 1, 3]
    assert features.rows.shape == (6, 4 if kind == "tensor" else 12)
    back = write_features(features, features.rows, features.num_rows)
    if kind == "tensor":
        assert torch.equal(back, rows)
    else:
        assert torch.equal(back[0], rows)
        assert all(torch.equal(a, b) for a, b in zip(back[1], deep, strict=True))
    zero = torch.zeros((), requires_grad=True)
    touched = touch(output, zero)
    assert (touched if kind == "tensor" else touched[0]).requires_grad


def test_features_of_images_of_one_size_come_back_image_by_image():
    output = torch.randn(3, 5, 4)
    features = read_features(output, inputs_of([5, 5, 5]))
    assert (features.num_rows.tolist(), features.rows.shape) == ([5, 5, 5], (15, 4))
    assert torch.equal(write_features(features, features.rows, features.num_rows), output)


def test_features_that_cannot_be_told_apart_are_refused():
    with refused(TrimtabError, "3", "7", "4"):
        read_features(torch.randn(7, 4), inputs_of([2, 1, 3]))
    with refused(TrimtabError):
        read_features({}, inputs_of([1]))


def test_micro_batches_of_families_without_grids_are_not_pooled():
    handle = SimpleNamespace(family=BatchFamily(), model=torch.nn.Linear(1, 1))
    with refused(TrimtabError):
        encode_pooled(handle, [{}])
    handle = SimpleNamespace(family=GridFamily(), heartbeat=object())
    with refused(TrimtabError):
        encode_pooled(handle, [])


def test_inputs_of_several_micro_batches_join():
    joined = join_inputs([inputs_of([2, 1]), inputs_of([3])])
    assert joined.take(np.array([2, 1])).arguments()["pixels"][:, 0].tolist() == [*range(12), *range(8, 12)]
    assert (joined.patches.tolist(), joined.rows.tolist(), len(joined)) == ([8, 4, 12], [2, 1, 3], 3)
    assert join_inputs([]) is None


def test_fingerprints_see_types_shapes_and_values():
    x = torch.arange(1000.0)
    marks = {
        fingerprint(["a"], [x]),
        fingerprint(["b"], [x]),
        fingerprint(["a"], [x + 1]),
        fingerprint(["a"], [x.double()]),
        fingerprint(["a"], [x.view(10, 100)]),
        fingerprint(["a"], []),
    }
    assert len(marks) == 6
    assert fingerprint(["a"], [x.clone()]) in marks
    assert differing_ranks([7, 8, 7, 9]) == [1, 3]
    assert differing_ranks([7, 8]) == [1]


def test_a_trainer_shares_images_as_its_plan_says_or_by_dispatch(monkeypatch):
    monkeypatch.setattr(callback, "vision_dp", lambda model, group, **options: ("options", options))
    monkeypatch.setattr(callback, "vision_dp_from_plan", lambda model, group, plan, **options: (plan, options))

    def begin(world_size, **options):
        hook = callback.VisionDataParallelCallback(**options)
        hook.on_train_begin(SimpleNamespace(world_size=world_size), None, None, torch.nn.Linear(1, 1))
        return hook.handle

    assert begin(2, rule="contiguous") == ("options", {"exchange": "dispatch", "rule": "contiguous"})
    assert begin(2, plan="plan", timeout_s=9.0) == ("plan", {"timeout_s": 9.0})
    assert begin(1, plan="plan") is None


def test_a_kind_that_a_rank_lacks_is_encoded_once_and_in_the_order_of_all_ranks():
    encoded = []

    def heartbeat(present, missing):
        encoded.clear()
        run = lambda kind, template: (encoded.append(template), torch.ones(()))[1]  # noqa: E731
        asked = {"control": None, "functions": dict(zip(KINDS, KINDS, strict=True)), "family": None, "config": None}
        templates = dict(zip(KINDS, KINDS, strict=True))
        beat = Heartbeat(**asked, is_dispatch=False, run=run, templates=templates)
        beat._present, beat._missing = present, missing
        return beat

    def steps(beat, *after):
        return [beat.run_missing(kind) is not None for kind in after]

    assert steps(heartbeat(("video",), ["image"]), None, None, "video") == [True, False, False]
    assert encoded == ["image"]
    assert steps(heartbeat(("image",), ["video"]), None, "image", "image") == [False, True, False]
    assert encoded == ["video"]
    both = heartbeat((), ["image", "video"])
    assert both.run_missing(None) == 2
    assert encoded == ["image", "video"]
