//! Values of keys that are written as text, each checked when it is read.

use std::{
    fmt::Display,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use api::{
    egress::{AlertAction, Webhook},
    node,
};
use ipnet::IpNet;
use model::Bytes;
use netisolation::{Access, Destinations, Protocol, canonical};
use oci_image::registry::Endpoint;
use pool::WarmMarks;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

const DNS_PORT: u16 = 53;
/// Minimum of the server's memory: below it, the kernel would kill the server during its start.
const LEAST_SERVER_MEMORY: Bytes = Bytes::mib(64);

/// A value that the configuration writes as text, which is kept for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Text<T> {
    pub(super) text: String,
    pub(super) value: T,
}

impl<T: FromStr<Err: Display>> FromStr for Text<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        let value = text.parse()?;
        let text = text.to_owned();
        Ok(Self { text, value })
    }
}

impl<T: FromStr<Err: Display>> Text<T> {
    /// A default.
    pub(super) fn of(text: &str) -> Self {
        match text.parse() {
            Ok(value) => value,
            Err(why) => panic!("the default {text:?} is not valid: {why}"),
        }
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl<T> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.text.serialize(to)
    }
}

/// A number from `MIN` to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Bounded<const MIN: u32, const MAX: u32>(pub(super) u32);

impl<'de, const MIN: u32, const MAX: u32> Deserialize<'de> for Bounded<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match i64::deserialize(from)?.try_into() {
            Ok(number) if (MIN..=MAX).contains(&number) => Ok(Self(number)),
            _ => Err(D::Error::custom(format!(
                "use a number from {MIN} to {MAX}"
            ))),
        }
    }
}

/// A size limit, or `none`. Zero is rejected because its meaning ("no limit" or "nothing allowed") would be ambiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ceiling(pub(super) Option<Bytes>);

impl FromStr for Ceiling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "none" => Ok(Self(None)),
            Ok(Bytes(0)) => Err("0 is not a valid limit: use none for no limit".to_owned()),
            Ok(size) => Ok(Self(Some(size))),
            Err(why) => Err(format!("{why}; use none for no limit")),
        }
    }
}

/// The memory limit of the server, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerMemory(pub(super) Option<Bytes>);

impl FromStr for ServerMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<Ceiling>()?.0 {
            Some(size) if size < LEAST_SERVER_MEMORY => Err(format!(
                "{size} is too little for a server: use {LEAST_SERVER_MEMORY} or more"
            )),
            limit => Ok(Self(limit)),
        }
    }
}

/// Marks of the warm stock as LOW:HIGH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Marks(pub(super) WarmMarks);

impl FromStr for Marks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not LOW:HIGH with LOW at most HIGH: write it like 2:4");
        let (low, high) = text.split_once(':').ok_or_else(wrong)?;
        let low = low.parse().map_err(|_| wrong())?;
        let high = high.parse().map_err(|_| wrong())?;
        if low <= high {
            Ok(Self(WarmMarks { low, high }))
        } else {
            Err(wrong())
        }
    }
}

/// A timeout of at most `u32::MAX` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timeout {
    pub(super) seconds: u32,
}

impl FromStr for Timeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let time: Duration = humantime::parse_duration(text)
            .map_err(|why| format!("{text:?} is not a time: {why}; write it like 24h"))?;
        let seconds = u32::try_from(time.as_secs());
        let seconds = seconds.map_err(|_| format!("{text} is too long: use at most 136 years"))?;
        Ok(Self { seconds })
    }
}

/// The name of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeName;

impl FromStr for NodeName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        node::is_name(text).then_some(Self).ok_or_else(|| {
            format!("{text:?} is not a name of a node: use lower-case letters, digits and hyphens, at most 63")
        })
    }
}

/// A CIDR block or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cidr(pub(super) IpNet);

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let single = text.parse::<IpAddr>().map(IpNet::from).ok();
        single
            .or_else(|| text.parse::<IpNet>().map(|block| block.trunc()).ok())
            .map(Self)
            .ok_or_else(|| format!("{text:?} is neither an address nor a CIDR block: write it like 10.1.2.3 or fd00::/8"))
    }
}

/// Addresses that are opened or denied, as CIDR[:PORT].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block(pub(super) Destinations);

impl FromStr for Block {
    type Err = String;

    /// Parses `CIDR[:PORT]`. A port follows the prefix length: `10.0.0.0/8:443`, `fd00::/8:443`. An IPv6 address can
    /// have a port only if it has a prefix length.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not CIDR[:PORT]: write it like 10.1.2.3/32:443 or fd00::/8");
        let (block, port) = match (text.rsplit_once('/'), text.parse::<IpAddr>()) {
            (Some((_, tail)), _) => cut_port(text, tail),
            (None, Ok(_)) => (text, None),
            (None, Err(_)) => cut_port(text, text),
        };
        let block = match block.parse::<IpAddr>() {
            Ok(address) => IpNet::from(address),
            Err(_) => block.parse::<IpNet>().map_err(|_| wrong())?,
        };
        let access = match port.map(str::parse::<u16>) {
            None => Vec::new(),
            Some(Ok(port)) if port > 0 => [Protocol::Tcp, Protocol::Udp]
                .map(|protocol| Access {
                    protocol,
                    first: port,
                    last: port,
                })
                .into(),
            Some(_) => return Err(wrong()),
        };
        let block = canonical(block);
        Ok(Self(Destinations { block, access }))
    }
}

/// Splits `text` into the part before the first colon in `tail` and the port after this colon. `tail` must be the end
/// of `text`.
fn cut_port<'a>(text: &'a str, tail: &'a str) -> (&'a str, Option<&'a str>) {
    match tail.split_once(':') {
        Some((_, port)) => (&text[..text.len() - port.len() - 1], Some(port)),
        None => (text, None),
    }
}

/// An upstream DNS server. The port defaults to 53.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameServer(pub(super) SocketAddr);

impl FromStr for NameServer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let whole = text.parse::<SocketAddr>();
        let whole = whole.or_else(|_| text.parse().map(|ip: IpAddr| (ip, DNS_PORT).into()));
        whole.map(Self).map_err(|_| {
            format!("{text:?} is not ADDRESS[:PORT]: write it like 9.9.9.9, [2620:fe::fe]:53 or 127.0.0.53")
        })
    }
}

/// The path of the egress proxy, or `none`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EgressProxy {
    None,
    Program(PathBuf),
}

impl FromStr for EgressProxy {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "none" => Self::None,
            path => Self::Program(path.into()),
        })
    }
}

/// Where alerts go: a URL, or else the path of a program.
#[derive(Clone, Debug)]
pub(super) struct AlertTo(pub(super) AlertAction);

impl FromStr for AlertTo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(if text.contains("://") {
            AlertAction::Webhook(text.parse()?)
        } else {
            AlertAction::Command(text.into())
        }))
    }
}

/// The URL of a trace collector.
#[derive(Clone, Debug)]
pub(super) struct Collector;

impl FromStr for Collector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<Webhook>().map(|_| Self)
    }
}

/// An alternative server for pulling the images of a domain, as DOMAIN=URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mirror {
    pub(super) domain: String,
    pub(super) endpoint: Endpoint,
}

impl FromStr for Mirror {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not DOMAIN=URL: write it like docker.io=https://mirror.example:5000"
            )
        };
        let (domain, url) = text.split_once('=').ok_or_else(wrong)?;
        if domain.is_empty() || domain.contains('/') {
            return Err(wrong());
        }
        Ok(Self {
            domain: domain.to_owned(),
            endpoint: url.parse().map_err(|_| wrong())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_size_or_none() {
        let read = |text: &str| text.parse::<Ceiling>().map(|ceiling| ceiling.0);
        assert_eq!(read("none"), Ok(None));
        assert_eq!(read("64MiB"), Ok(Some(Bytes::mib(64))));
        for wrong in ["0", "0MiB", "", "much", "None"] {
            assert!(read(wrong).unwrap_err().contains("none"), "{wrong}");
        }
    }

    #[test]
    fn exceptions_are_blocks_with_an_optional_port() {
        let read = |text: &str| {
            text.parse::<Block>()
                .map(|o| (o.0.block.to_string(), o.0.access))
        };
        let whole = |block: &str| Ok((block.to_owned(), Vec::new()));
        assert_eq!(read("10.1.2.3"), whole("10.1.2.3/32"));
        assert_eq!(read("10.1.2.3/8"), whole("10.0.0.0/8"));
        assert_eq!(read("fd00::1"), whole("fd00::1/128"));
        assert_eq!(read("fd00::/8"), whole("fd00::/8"));
        assert_eq!(read("::ffff:10.0.0.0/104"), whole("10.0.0.0/8"));
        for (text, block) in [
            ("10.1.2.3:443", "10.1.2.3/32"),
            ("10.0.0.0/8:443", "10.0.0.0/8"),
            ("fd00::/8:443", "fd00::/8"),
        ] {
            let (found, access) = read(text).unwrap();
            assert_eq!((found.as_str(), access.len()), (block, 2));
            assert!(access.iter().all(|a| (a.first, a.last) == (443, 443)));
        }
        for wrong in [
            "",
            "10",
            "10.0.0.0/33",
            "10.0.0.0/8:0",
            "10.0.0.0/8:x",
            "a.test:1",
            ":1",
        ] {
            assert!(read(wrong).unwrap_err().contains(wrong), "{wrong}");
        }
    }

    #[test]
    fn dns_servers_default_to_port_53() {
        let read = |text: &str| text.parse::<NameServer>().map(|s| s.0.to_string());
        assert_eq!(read("9.9.9.9"), Ok("9.9.9.9:53".into()));
        assert_eq!(read("9.9.9.9:5353"), Ok("9.9.9.9:5353".into()));
        assert_eq!(read("2620:fe::fe"), Ok("[2620:fe::fe]:53".into()));
        assert!(read("dns.test").is_err());
    }

    #[test]
    fn mirrors_name_a_domain_and_a_server() {
        let mirror: Mirror = "127.0.0.1:5000=http://127.0.0.1:5000".parse().unwrap();
        assert_eq!(mirror.domain, "127.0.0.1:5000");
        assert_eq!(mirror.endpoint.to_string(), "http://127.0.0.1:5000");
        for wrong in [
            "docker.io",
            "=http://a",
            "docker.io=mirror:5000",
            "docker.io/library=http://a",
            "docker.io=http://a/path",
        ] {
            let why = wrong.parse::<Mirror>().unwrap_err();
            assert!(why.contains("DOMAIN=URL"), "{wrong}: {why}");
        }
    }
}
