//! Network options of `cube-api serve`.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr,
};

use api::{
    control::EgressConfig,
    egress::{AlertAction, AlertSpec, CallFile, EgressSpec, Webhook},
    network::{NetworkSpec, Rewriting},
};
use clap::{Args, ValueEnum};
use ipnet::IpNet;
use model::Bytes;
use netisolation::{
    Access, DefaultEgress, Destinations, ForbiddenAddresses, Protocol, Uplinks, canonical,
};

use super::ceiling::Ceiling;

const DNS_PORT: u16 = 53;
/// About half of a 1 Gbit/s link. A single sandbox leaves the other half to other sandboxes and the server.
const RATE: Ceiling = Ceiling(Some(Bytes::mib(64)));

#[derive(Args)]
pub(super) struct NetworkOptions {
    /// Network of sandboxes
    #[arg(long, value_enum, default_value = "isolated")]
    network: Network,
    /// Interface through which packets of sandboxes may leave; repeat for more [default: those of the default routes]
    #[arg(long, value_name = "NAME")]
    uplink: Vec<String>,
    /// Permit part of the ranges that are denied to all sandboxes; a sandbox's own policy must allow it too
    #[arg(long, value_name = "CIDR[:PORT]")]
    network_exception: Vec<Block>,
    /// Deny a block, or one of its ports, to all sandboxes and to connections that this server makes for clients
    /// (webhooks, registries, DNS servers, proxies); no policy or exception can open it
    #[arg(long, value_name = "CIDR[:PORT]")]
    network_deny: Vec<Block>,
    /// Outbound access of a sandbox whose client sets no network options
    #[arg(long, value_enum, default_value = "deny")]
    default_egress: Egress,
    /// Network access of the steps of template builds
    #[arg(long, value_enum, default_value = "internet")]
    build_egress: Egress,
    /// Upstream DNS server for sandboxes; repeat for more [default: those of /etc/resolv.conf]
    #[arg(long, value_name = "ADDRESS[:PORT]")]
    dns_server: Vec<NameServer>,
    /// Network bandwidth of each sandbox per second and direction, or none for no limit [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    network_rate: Option<Ceiling>,
    /// Proxy that checks host names and applies network.rules, or none: names are not checked, rules are refused
    /// [default: cube-egress next to this program, if it exists]
    #[arg(long, value_name = "FILE")]
    egress_proxy: Option<EgressProxy>,
    /// Maximum number of concurrent connections of all sandboxes through the proxy; each needs two open files [default:
    /// 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    egress_connections: Option<u32>,
    /// Append all outbound calls of sandboxes that pass the proxy to egress-calls.jsonl in the state directory
    #[arg(long)]
    egress_calls: bool,
    /// Alert when packets or requests of a sandbox have been refused N times, at most once a minute for each sandbox
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), requires = "alert_to")]
    alert_refusals: Option<u64>,
    /// Program that gets each alert as JSON on its standard input
    #[arg(
        long,
        value_name = "FILE",
        group = "alert_to",
        requires = "alert_refusals"
    )]
    alert_command: Option<PathBuf>,
    /// URL to which each alert is sent as the JSON body of a POST; redirects are not followed
    #[arg(
        long,
        value_name = "URL",
        group = "alert_to",
        requires = "alert_refusals"
    )]
    alert_webhook: Option<Webhook>,
}

/// The value of `--egress-proxy`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum EgressProxy {
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

/// File name of the proxy, which is in the directory of this program.
const PROXY: &str = "cube-egress";

#[derive(Clone, Copy, ValueEnum)]
enum Network {
    /// Each sandbox has its own TAP with a policy, which the host must be able to enforce
    Isolated,
    /// Sandboxes have no network
    None,
}

#[derive(Clone, Copy, ValueEnum)]
enum Egress {
    /// Nothing
    Deny,
    /// Everything except the ranges that are denied to all sandboxes
    Internet,
}

/// The value of `--network-exception` and `--network-deny`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block(Destinations);

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

/// The value of `--dns-server`. The port defaults to 53.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NameServer(SocketAddr);

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

impl From<Egress> for DefaultEgress {
    fn from(egress: Egress) -> Self {
        match egress {
            Egress::Deny => Self::Deny,
            Egress::Internet => Self::Internet,
        }
    }
}

impl NetworkOptions {
    pub(super) fn build_egress(&self) -> DefaultEgress {
        self.build_egress.into()
    }

    /// The addresses that the operator denies.
    pub(super) fn denied(&self) -> Vec<Destinations> {
        self.network_deny
            .iter()
            .map(|block| block.0.clone())
            .collect()
    }

    /// The values of `--network-deny` for the log, or `None` if there are none.
    pub(super) fn shown_denied(&self) -> Option<String> {
        let shown = |Block(Destinations { block, access })| match access.first() {
            Some(service) => format!("{block}:{}", service.first),
            None => block.to_string(),
        };
        let shown: Vec<_> = self.network_deny.iter().cloned().map(shown).collect();
        (!shown.is_empty()).then(|| shown.join(", "))
    }

    /// The network configuration, or `None` if sandboxes have no network. `beside` is the directory of this program.
    ///
    /// # Errors
    /// Returns a message if `--network none` is combined with another network option, or if the proxy does not exist.
    pub(super) fn spec(self, beside: &Path) -> Result<Option<NetworkSpec>, String> {
        let (default, denied) = (self.default_egress.into(), self.denied());
        if let Network::None = self.network {
            let is_plain = self.uplink.is_empty()
                && self.network_exception.is_empty()
                && self.dns_server.is_empty()
                && self.network_rate.is_none()
                && self.alert_refusals.is_none()
                && !self.egress_calls
                && self.egress_connections.is_none()
                && matches!(self.egress_proxy, None | Some(EgressProxy::None))
                && default == DefaultEgress::Deny;
            return if is_plain {
                Ok(None)
            } else {
                Err("--network none excludes all other network options: remove them, or use --network isolated".into())
            };
        }
        let uplinks = if self.uplink.is_empty() {
            Uplinks::DefaultRoutes
        } else {
            Uplinks::Named(self.uplink)
        };
        let proxy = proxy(self.egress_proxy, beside)?;
        let calls = if self.egress_calls {
            CallFile::On
        } else {
            CallFile::Off
        };
        let needs_proxy = [
            ("--egress-calls", calls == CallFile::On),
            ("--egress-connections", self.egress_connections.is_some()),
        ];
        if let (Some((option, _)), None) = (needs_proxy.iter().find(|(_, given)| *given), &proxy) {
            return Err(format!(
                "{option} needs the proxy, and {PROXY} is not next to this program: set its path with --egress-proxy"
            ));
        }
        let command = self.alert_command.map(AlertAction::Command);
        let action = command.or(self.alert_webhook.map(AlertAction::Webhook));
        let exceptions = self.network_exception.into_iter().map(|opened| opened.0);
        let servers = self.dns_server.into_iter().map(|server| server.0);
        Ok(Some(NetworkSpec {
            uplinks,
            egress: EgressConfig {
                default,
                forbidden: ForbiddenAddresses::new(exceptions.collect(), denied),
                rewriting: match proxy {
                    Some(_) => Rewriting::On,
                    None => Rewriting::Off,
                },
            },
            proxy: proxy.map(|program| EgressSpec {
                program,
                calls,
                connections: self.egress_connections,
            }),
            alert: (self.alert_refusals.zip(action))
                .map(|(refusals, action)| AlertSpec { refusals, action }),
            dns_servers: servers.collect(),
            bytes_per_s: self.network_rate.unwrap_or(RATE).0.map(|rate| rate.0),
        }))
    }
}

/// Addresses forbidden to connections that the server makes for clients. `exceptions` are blocks opened for them.
pub(super) fn forbidden(exceptions: &[IpNet], denied: &[Destinations]) -> ForbiddenAddresses {
    let exceptions = exceptions.iter().map(|block| Destinations {
        block: *block,
        access: Vec::new(),
    });
    ForbiddenAddresses::new(exceptions.collect(), denied.to_vec())
}

fn proxy(option: Option<EgressProxy>, beside: &Path) -> Result<Option<PathBuf>, String> {
    match option {
        None => Ok(Some(beside.join(PROXY)).filter(|path| path.is_file())),
        Some(EgressProxy::None) => Ok(None),
        Some(EgressProxy::Program(path)) if path.is_file() => Ok(Some(path)),
        Some(EgressProxy::Program(path)) => Err(format!(
            "cannot find the egress proxy at {}: set the path of {PROXY} with --egress-proxy",
            path.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
