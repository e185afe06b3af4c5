//! The network of sandboxes: sections `network`, `egress` and `alerts`.

use std::path::{Path, PathBuf};

use api::{
    control::EgressConfig,
    egress::{AlertSpec, CallFile, EgressSpec},
    network::{MAX_SANDBOXES, NetworkSpec, Rewriting},
};
use model::Bytes;
use netisolation::{DefaultEgress, Destinations, ForbiddenAddresses, Uplinks};

use super::{
    sections::{AlertsSection, Egress, EgressSection, NetworkMode, ServerConfig},
    spec::Checks,
    values::{Block, Cidr, EgressProxy, Text},
};

/// About half of a 1 Gbit/s link. A single sandbox leaves the other half to other sandboxes and the server.
const RATE: Bytes = Bytes::mib(64);
/// File name of the proxy, which is in the directory of this program.
const PROXY: &str = "cube-egress";

impl From<Egress> for DefaultEgress {
    fn from(egress: Egress) -> Self {
        match egress {
            Egress::Deny => Self::Deny,
            Egress::Internet => Self::Internet,
        }
    }
}

/// The network, or `None` if sandboxes have none. `beside` is the directory of this program.
pub(super) fn network(
    config: &ServerConfig,
    checks: &mut Checks<'_>,
    beside: &Path,
) -> Option<NetworkSpec> {
    let (network, egress) = (&config.network, &config.egress);
    let alert = alert(&config.alerts, checks);
    if network.mode == NetworkMode::None {
        refuse_network_keys(config, checks);
        return None;
    }
    let sandboxes = config.pool.max_sandboxes;
    if sandboxes > MAX_SANDBOXES {
        checks.wrong(
            "pool.max_sandboxes",
            format!(
                "{sandboxes} sandboxes cannot have a network on one host: set it to at most {MAX_SANDBOXES}, or run \
                 sandboxes without network (network.mode = \"none\")"
            ),
        );
    }
    let proxy = proxy(egress, checks, beside);
    let needs_proxy = [
        ("egress.log_calls", egress.log_calls),
        ("egress.connections", egress.connections.is_some()),
    ];
    for (key, _) in needs_proxy.iter().filter(|(_, is_set)| *is_set) {
        if proxy.is_none() {
            checks.wrong(
                key,
                format!(
                    "needs the proxy, and {PROXY} is not next to this program: set egress.proxy"
                ),
            );
        }
    }
    Some(NetworkSpec {
        uplinks: if network.uplinks.is_empty() {
            Uplinks::DefaultRoutes
        } else {
            Uplinks::Named(network.uplinks.clone())
        },
        egress: EgressConfig {
            default: network.default_egress.into(),
            forbidden: ForbiddenAddresses::new(
                destinations(&network.exceptions),
                destinations(&network.denied),
            ),
            rewriting: match proxy {
                Some(_) => Rewriting::On,
                None => Rewriting::Off,
            },
        },
        proxy: proxy.map(|program| EgressSpec {
            program,
            calls: if egress.log_calls {
                CallFile::On
            } else {
                CallFile::Off
            },
            connections: egress.connections.map(|connections| connections.0),
        }),
        alert,
        dns_servers: network
            .dns_servers
            .iter()
            .map(|server| server.value.0)
            .collect(),
        bytes_per_s: match &config.sandbox.network_rate {
            None => Some(RATE.0),
            Some(rate) => rate.value.0.map(|rate| rate.0),
        },
    })
}

/// Without a network, no key may open or limit one.
fn refuse_network_keys(config: &ServerConfig, checks: &mut Checks<'_>) {
    let (network, egress) = (&config.network, &config.egress);
    let proxy = egress.proxy.as_ref().map(|proxy| &proxy.value);
    let used = [
        ("network.uplinks", !network.uplinks.is_empty()),
        ("network.exceptions", !network.exceptions.is_empty()),
        ("network.dns_servers", !network.dns_servers.is_empty()),
        (
            "network.default_egress",
            network.default_egress != Egress::Deny,
        ),
        (
            "sandbox.network_rate",
            config.sandbox.network_rate.is_some(),
        ),
        (
            "egress.proxy",
            matches!(proxy, Some(EgressProxy::Program(_))),
        ),
        ("egress.connections", egress.connections.is_some()),
        ("egress.log_calls", egress.log_calls),
        ("alerts.refusals", config.alerts.refusals.is_some()),
    ];
    for (key, _) in used.iter().filter(|(_, is_used)| *is_used) {
        checks.wrong(
            key,
            "sandboxes have no network: remove it, or set network.mode to \"isolated\"",
        );
    }
}

fn alert(alerts: &AlertsSection, checks: &mut Checks<'_>) -> Option<AlertSpec> {
    match (alerts.refusals, &alerts.to) {
        (Some(refusals), Some(to)) => {
            let action = to.value.0.clone();
            return Some(AlertSpec {
                refusals: refusals.get(),
                action,
            });
        }
        (Some(_), None) => checks.wrong(
            "alerts.refusals",
            "also set alerts.to: the URL or the program that gets the alerts",
        ),
        (None, Some(_)) => checks.wrong(
            "alerts.to",
            "also set alerts.refusals: after how many refusals an alert is sent",
        ),
        (None, None) => {}
    }
    None
}

fn proxy(egress: &EgressSection, checks: &mut Checks<'_>, beside: &Path) -> Option<PathBuf> {
    match egress.proxy.as_ref().map(|proxy| &proxy.value) {
        None => Some(beside.join(PROXY)).filter(|path| path.is_file()),
        Some(EgressProxy::None) => None,
        Some(EgressProxy::Program(path)) => {
            if !path.is_file() {
                let shown = path.display();
                checks.wrong(
                    "egress.proxy",
                    format!("cannot find the egress proxy at {shown}: set the path of {PROXY}"),
                );
            }
            Some(path.clone())
        }
    }
}

pub(super) fn destinations(blocks: &[Text<Block>]) -> Vec<Destinations> {
    blocks.iter().map(|block| block.value.0.clone()).collect()
}

/// Addresses forbidden to connections that the server makes for clients. `exceptions` are blocks opened for them.
pub(super) fn forbidden(exceptions: &[Text<Cidr>], denied: &[Destinations]) -> ForbiddenAddresses {
    let exceptions = exceptions.iter().map(|block| Destinations {
        block: block.value.0,
        access: Vec::new(),
    });
    ForbiddenAddresses::new(exceptions.collect(), denied.to_vec())
}
