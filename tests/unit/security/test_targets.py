"""The allow list of webhook targets: names, addresses, and the URLs that try to be both."""

import pytest

from delayserver.errors import InputError
from delayserver.security.targets import Target, TargetPolicy, split_url


def allows_url(policy, url):
    try:
        policy.check_url(url)
    except InputError as error:
        assert error.pointer == "/url"
        return False
    return True


def allows_address(policy, host, port, ip):
    try:
        policy.check_address(host, port, ip)
    except InputError as error:
        assert error.pointer == "/url"
        return False
    return True


@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        ("http://a.test", Target("http", "a.test", 80, False), "/"),
        ("HTTPS://A.Test:8443/X?y=Z", Target("https", "a.test", 8443, False), "/X?y=Z"),
        ("https://a.test?x", Target("https", "a.test", 443, False), "/?x"),
        ("http://my_service:9000/a/../b@c", Target("http", "my_service", 9000, False), "/a/../b@c"),
        ("http://127.0.0.1:9000/", Target("http", "127.0.0.1", 9000, True), "/"),
        ("http://[0:0::1]:9000/", Target("http", "::1", 9000, True), "/"),
        ("http://xn--bcher-kva.test/", Target("http", "xn--bcher-kva.test", 80, False), "/"),
    ],
)
def test_a_url_is_split(url, target, path):
    assert split_url(url) == (target, path)


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://a.test:80/", "a.test"),
        ("https://a.test:80/", "a.test:80"),
        ("https://a.test/", "a.test"),
        ("http://[::1]:81/", "[::1]:81"),
    ],
)
def test_the_host_header(url, authority):
    assert split_url(url)[0].authority == authority


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.test",
        "//a.test/",
        "ftp://a.test/",
        "file:///etc/passwd",
        "http:///x",
        "http://",
        "http://user@a.test/",
        "http://user:password@a.test/",
        "http://a.test@b.test/",
        "http://a.test/#fragment",
        "http://a.test\\@b.test/",
        "http://a.test/a\\b",
        "http://a.test/a b",
        "http://a.test/\r\nx: y",
        "http://a.test/\t",
        " http://a.test/",
        "http://a.test/\n",
        "http://a.test:0/",
        "http://a.test:65536/",
        "http://a.test:/",
        "http://a.test./",
        "http://a..test/",
        "http://-a.test/",
        "http://a-.test/",
        "http://a%2etest/",
        "http://bücher.test/",
        "http://\u212aelvin.test/",  # the Kelvin sign: a k to those who ignore case
        "http://local\u017fhost/",  # a long s
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://127.1/",
        "http://127.0.1/",
        "http://0x7f.1/",
        "http://0x7f000001/",
        "http://a.0x1/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://127.0.0.1./",
        "http://256.0.0.1/",
        "http://[::1/",
        "http://[::g]/",
        "http://[127.0.0.1]/",
        "http://[fe80::1%25eth0]/",
        "http://" + "a" * 64 + ".test/",
        "http://" + "a." * 127 + "test/",
        "http://a.test/" + "x" * 2048,
    ],
)
def test_a_url_with_two_readings_or_none_is_refused(url):
    with pytest.raises(InputError) as caught:
        split_url(url)
    assert caught.value.pointer == "/url"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://localhost:9000/x", True),
        ("http://127.0.0.1:9000/x", True),
        ("https://127.255.0.1/", True),
        ("http://[::1]:9000/x", True),
        ("http://[::ffff:127.0.0.1]/", True),
        ("http://hooks.example.com/", False),
        ("http://10.0.0.1/", False),
        ("http://0.0.0.0/", False),
        ("http://[::]/", False),
        ("http://169.254.169.254/latest/meta-data/", False),
        ("http://localhost.example.com/", False),
    ],
)
def test_without_a_list_only_loopback_is_allowed(url, allowed):
    assert allows_url(TargetPolicy(), url) is allowed


def test_the_name_localhost_is_refused_when_it_leads_elsewhere():
    assert allows_address(TargetPolicy(), "localhost", 80, "127.0.0.1")
    assert not allows_address(TargetPolicy(), "localhost", 80, "10.0.0.1")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://hooks.example.com/", True),
        ("https://HOOKS.example.com:1234/", True),
        ("https://example.com/", False),
        ("https://xhooks.example.com/", False),
        ("https://hooks.example.com.evil.test/", False),
        ("https://a.wild.test/", True),
        ("https://a.b.wild.test/", True),
        ("https://wild.test/", False),
        ("https://awild.test/", False),
        ("https://one.test:8443/", True),
        ("https://one.test/", False),
        ("https://a.ports.test:81/", True),
        ("https://a.ports.test:82/", False),
        ("http://10.9.8.7/", True),
        ("http://11.0.0.1/", False),
        ("http://192.0.2.1:80/", True),
        ("http://192.0.2.1:81/", False),
        ("http://[2001:db8::1]:80/", True),
        ("http://[2001:db8::1]:81/", False),
        ("http://8.8.8.8/", False),  # public, but nobody listed it
        ("http://localhost/", False),  # a list replaces the default
        ("http://127.0.0.1/", False),
    ],
)
def test_the_name_gate(url, allowed):
    policy = TargetPolicy(
        [
            "Hooks.example.com",
            "*.wild.test",
            "one.test:8443",
            "*.ports.test:81",
            "10.0.0.0/8",
            "192.0.2.1:80",
            "[2001:db8::1]:80",
        ]
    )
    assert allows_url(policy, url) is allowed


@pytest.mark.parametrize(
    "ip",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "168.63.129.16",
        "169.254.169.254",
        "172.31.0.1",
        "192.0.0.192",
        "192.168.1.1",
        "198.18.0.1",
        "203.0.113.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%2",
        "fec0::1",
        "ff02::1",
    ],
)
def test_a_listed_name_that_resolves_to_a_special_address_is_refused(ip):
    """DNS rebinding: whoever owns a listed name must not reach our own network with it."""
    assert not allows_address(TargetPolicy(["hooks.example.com"]), "hooks.example.com", 443, ip)


@pytest.mark.parametrize(
    "ip", ["93.184.215.14", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e", "2606:4700::1111"]
)
def test_a_listed_name_may_resolve_to_a_public_address(ip):
    assert allows_address(TargetPolicy(["hooks.example.com"]), "hooks.example.com", 443, ip)


def test_a_special_address_that_is_listed_too_is_allowed():
    policy = TargetPolicy(["worker", "172.16.0.0/12", "10.0.0.5:9000"])
    assert allows_address(policy, "worker", 80, "172.18.0.3")
    assert allows_address(policy, "worker", 80, "::ffff:172.18.0.3")
    assert not allows_address(policy, "worker", 80, "192.168.0.1")
    assert allows_address(policy, "worker", 9000, "10.0.0.5")
    assert not allows_address(policy, "worker", 9001, "10.0.0.5")


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "a.*.test",
        "http://a.test",
        "a.test/path",
        "a.test:0",
        "a.test:99999",
        "10.0.0.1/8",  # host bits: which did they mean?
        "10.0.0.0/33",
        "10.0.0:80",
        "[::1]",
        "[::1]:0",
        "a b",
        "bücher.test",
    ],
)
def test_an_entry_that_cannot_be_read_is_named(entry):
    with pytest.raises(InputError) as caught:
        TargetPolicy(["a.test", entry])
    assert caught.value.pointer == "/1"
