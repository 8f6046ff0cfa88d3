"""The footer of the site."""

import pytest

from tools import docs_site


@pytest.mark.parametrize(
    "origin",
    [
        "https://example.org/group/dora.git",
        "https://example.org/group/dora/",
        "https://user:secret@example.org/group/dora",
        "git@example.org:group/dora.git",
        "ssh://git@example.org:2222/group/dora.git",
    ],
)
def test_links_to_the_repository(origin):
    assert docs_site.page_of(origin) == "https://example.org/group/dora"


@pytest.mark.parametrize("origin", ["", "/home/user/dora", "../dora.git", "file:///srv/dora.git"])
def test_a_directory_is_no_address(origin):
    assert docs_site.page_of(origin) is None
