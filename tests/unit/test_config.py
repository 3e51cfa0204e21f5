"""Settings from the environment: each is checked, and a misspelt one is not silently without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotset.config import Settings, load_settings
from hotset.errors import RequestError


def test_defaults() -> None:
    """Nothing set, or set to nothing."""
    home = Path.home() / ".cache" / "hotset"
    for environment in ({}, {"HOTSET_HOME": "", "HOTSET_ISA": "", "HF_ENDPOINT": "", "HF_TOKEN": ""}, {"PATH": "/bin"}):
        found = load_settings(environment)
        assert found == Settings(home, None, "https://huggingface.co", None)
        assert found.models_dir == home / "models"


def test_values() -> None:
    """Each variable reaches its field; an address loses its last slash, or URLs would have two."""
    environment = {
        "HOTSET_HOME": "~/x",
        "HOTSET_ISA": "avx2",
        "HF_ENDPOINT": "http://[::1]:8000/",
        "HF_TOKEN": "hf_a\n",
    }
    found = load_settings(environment)
    assert found == Settings(Path.home() / "x", "avx2", "http://[::1]:8000", "hf_a")
    assert "hf_a" not in repr(found)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HOTSET_HOME": "models"}, "HOTSET_HOME is 'models', expected an absolute path"),
        ({"HOTSET_ISA": "AVX2"}, "HOTSET_ISA is 'AVX2', expected one of avx2, avx512, neon"),
        ({"HF_ENDPOINT": "huggingface.co"}, "HF_ENDPOINT is 'huggingface.co', expected a web address"),
        ({"HF_ENDPOINT": "file:///etc"}, "HF_ENDPOINT is 'file:///etc', expected a web address"),
        ({"HF_ENDPOINT": "https://a/?x=1"}, "expected a web address"),
        ({"HF_TOKEN": "one two"}, "HF_TOKEN holds spaces or unprintable characters"),
        ({"HOTSET_THREADS": "2"}, "unknown environment variable HOTSET_THREADS"),
    ],
)
def test_wrong_values_are_refused_by_name(environment: dict[str, str], message: str) -> None:
    """A wrong value is an error of the request, and a secret is never part of the message."""
    with pytest.raises(RequestError) as caught:
        load_settings(environment)
    assert message in caught.value.message
    assert "one two" not in str(caught.value)
