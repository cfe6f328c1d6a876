"""URLs of images: which are fetched, and which addresses are dialled for them."""

import pytest

from sluice_server.services.media.urls import ImageUrl, hosts_of, is_public, read_url

HOSTS = hosts_of("Pictures.example, other.example:8443,")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://pictures.example/a/b.png?c=d#e", ImageUrl("pictures.example", 443, "/a/b.png?c=d")),
        ("https://PICTURES.example:443", ImageUrl("pictures.example", 443, "/")),
        ("https://other.example:8443/a", ImageUrl("other.example", 8443, "/a")),
    ],
)
def test_a_url_of_a_host_on_the_list_is_read(url: str, expected: ImageUrl) -> None:
    assert read_url(url, HOSTS) == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://pictures.example/a", "scheme 'http'"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("gopher://pictures.example/", "scheme 'gopher'"),
        ("//pictures.example/a", "scheme ''"),
        ("https://pictures.example:8443/a", "host 'pictures.example:8443'"),
        ("https://other.example/a", "host 'other.example'"),
        ("https://pictures.example.evil.example/a", "--media-from"),
        ("https://pictures.example./a", "--media-from"),
        ("https://169.254.169.254/latest/meta-data", "--media-from"),
        ("https://[::ffff:127.0.0.1]/a", "--media-from"),
        ("https://user:secret@pictures.example/a", "user or password"),
        ("https://evil.example\\@pictures.example/a", "backslash"),
        ("https://pictures.example/a b", "space"),
        ("https://pictures.example/\ta", "space"),
        ("https://pictures.example/ä", "not ASCII"),
        ("https://pictures.example:99999/a", "is not a URL"),
        ("https://[::1/a", "is not a URL"),
        ("https:pictures.example/a", "--media-from"),
        ("https://pictures.example/" + "a" * 2048, "at most 2048"),
    ],
)
def test_another_url_is_refused_with_the_reason(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read_url(url, HOSTS)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text", ["https://a.example", "a.example/b", "a b", "a.example:x", "*.example", "a.example:70000"]
)
def test_an_entry_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        hosts_of(text)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((one, True) for one in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:93.184.215.14")),
        *((one, False) for one in ("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0")),
        *(
            (one, False)
            for one in ("100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1")
        ),
        *((one, False) for one in ("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1")),
        *((one, False) for one in ("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1")),
        *((one, False) for one in ("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::")),
    ],
)
def test_only_addresses_of_the_public_internet_are_dialled(address: str, expected: bool) -> None:
    assert is_public(address) is expected
