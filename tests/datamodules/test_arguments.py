"""What a datamodule's keywords become: each is read by someone, and the leaves differ only where this file says so."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import docstring_parser  # jsonargparse's
import pytest

from lightning_dali.datamodules import (
    BaseDataModule,
    DALIDataModule,
    ImageDataModule,
    MultiModalDataModule,
    SpeechDataModule,
    VideoDataModule,
)
from lightning_dali.datamodules.arguments import sort_arguments
from lightning_dali.datamodules.options import Options
from lightning_dali.modalities import KindTransforms

LACKS = {  # options without a meaning there
    ImageDataModule: set(),
    VideoDataModule: {"channels_last", "hw_decoder_load"},
    SpeechDataModule: {"channels_last", "hw_decoder_load", "ragged"},
    MultiModalDataModule: set(),
    DALIDataModule: {"channels_last", "hw_decoder_load"},
}
DEFAULTS = {  # other than `Options`' own
    ImageDataModule: {},
    VideoDataModule: {"batch_size": 8, "num_threads": None, "depth": 3},
    SpeechDataModule: {"num_threads": None, "depth": 4},
    MultiModalDataModule: {"batch_size": 32, "num_threads": None, "depth": 3},
    DALIDataModule: {"ragged": "list"},
}
OTHER = {  # a value of each option that is nobody's default
    **dict(batch_size=5, num_workers=1, num_threads=3, shuffle=False, drop_last=False, seed=7, on_bad_sample="drop"),
    **dict(
        max_bad_samples=9, bad_samples_file="bad.jsonl", release_memory="epoch", with_index=True, channels_last=True
    ),
    **dict(device="cpu", prefetch=4, multiprocessing_context="spawn", persistent_workers=False, depth=6),
    **dict(hw_decoder_load=0.5, watchdog_seconds=1.5),
}


NEEDS: dict[Any, dict[str, Any]] = {MultiModalDataModule: {"kinds": ["image"]}}
"""Arguments without a default."""


@pytest.mark.parametrize("leaf", LACKS)
class TestLeaves:
    def test_signature_has_every_option_with_its_default(self, leaf: Any) -> None:
        defaults = {name: parameter.default for name, parameter in inspect.signature(leaf).parameters.items()}
        expected = {**{field.name: field.default for field in fields(Options)}, **DEFAULTS[leaf]}
        offered = {name: value for name, value in expected.items() if name not in LACKS[leaf]}
        assert {name: defaults.get(name, "not there") for name in offered} == offered
        assert not LACKS[leaf] & set(defaults)

    def test_every_option_arrives(self, leaf: Any) -> None:
        given = {name: value for name, value in OTHER.items() if name not in LACKS[leaf]}
        if "ragged" not in LACKS[leaf]:
            given["ragged"] = "error" if leaf is DALIDataModule else "list"
        assert set(given) == {field.name for field in fields(Options)} - LACKS[leaf]
        options = leaf(**given, **NEEDS.get(leaf, {})).options
        assert {name: getattr(options, name) for name in given} == given

    def test_what_is_no_option_arrives_too(self, leaf: Any) -> None:
        names = set(inspect.signature(leaf).parameters) & set(inspect.signature(BaseDataModule).parameters)
        datasets = {f"{stage}_dataset" for stage in ("train", "val", "test", "predict")}
        functions: dict[str, Any] = {
            name: (lambda batch: batch) for name in names - datasets - {"sampler", "batch_sampler"}
        }
        if leaf is MultiModalDataModule:  # which takes one a kind
            functions.update({f"{stage}_transform": KindTransforms({"image": len}) for stage in ("train", "eval")})
        made = leaf(**functions, sampler=[0], **NEEDS.get(leaf, {}))
        assert {name: getattr(made, f"_{name}") for name in functions} == functions
        assert made._sampler == [0]
        assert leaf(batch_sampler=[[0]], **NEEDS.get(leaf, {}))._batch_sampler == [[0]]


def test_an_argument_that_nothing_reads_is_refused() -> None:
    class Misspelled(BaseDataModule):
        def __init__(self, *, shufle: bool = True, own: int = 0) -> None:
            super().__init__(modality=None, **sort_arguments(locals(), own=("own",)))

    with pytest.raises(TypeError, match="Misspelled has arguments that nothing reads: shufle. Allowed are the fields"):
        Misspelled()


@pytest.mark.parametrize("kind", list(DEFAULTS), ids=lambda kind: kind.__name__)
def test_every_argument_is_explained(kind: type) -> None:
    """To `--help` too, which reads docstrings, and once: what a leaf says itself stands."""
    said = docstring_parser.parse(inspect.getdoc(kind) or "").params
    assert sorted(one.arg_name for one in said) == sorted(inspect.signature(kind).parameters)
    assert all(one.description for one in said)


def test_a_leaf_says_itself_what_is_different_for_it() -> None:
    said = {
        one.arg_name: one.description for one in docstring_parser.parse(inspect.getdoc(SpeechDataModule) or "").params
    }
    assert "decode audio" in str(said["num_threads"])
    assert str(said["seed"]).startswith("Of every order and draw")
