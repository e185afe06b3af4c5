//! Queries to upstream name servers on behalf of sandboxes.
//!
//! Each server list has a separate cache, so that the servers in one sandbox's policy cannot influence the answers to
//! sandboxes with other servers.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use hickory_proto::{
    op::ResponseCode,
    rr::{Name, RData, Record, RecordType},
};
use hickory_resolver::{
    TokioResolver,
    config::{ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts},
    net::{DnsError, NetError, runtime::TokioRuntimeProvider},
};
use tokio::sync::Semaphore;

/// Timeout of one attempt, over UDP or TCP, across all servers.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of one question: the wait for a permit, and all attempts for the name and its CNAME chain.
const DEADLINE: Duration = Duration::from_secs(5);
/// Maximum number of pending questions across all sandboxes; each uses a descriptor. The limit is many times that of
/// one sandbox (`guard::MAX_WAITING`), so that a few sandboxes cannot delay the others.
const MAX_PENDING: usize = 2048;
/// Maximum number of server lists for which a resolver and its cache are kept; the least recently used is dropped.
const MAX_LISTS: usize = 64;
/// Maximum number of answers in the cache of one server list.
const CACHE_SIZE: u64 = 1024;
/// Maximum number of CNAME records between the queried name and the name with addresses.
const MAX_CHAIN: usize = 8;
/// Maximum number of addresses in one answer. Further addresses are dropped; clients try only a few.
const MAX_ADDRESSES: usize = 16;
/// Maximum number of name servers used from /etc/resolv.conf (resolv.conf(5)).
const MAX_SERVERS: usize = 3;
const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS_PORT: u16 = 53;

/// The result of a question.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Addresses {
        /// At least one address of the requested family, in the order of the answer.
        addresses: Vec<IpAddr>,
        /// The shortest TTL of the addresses and of the CNAME records that led to them.
        ttl: Duration,
    },
    /// The name has no addresses of the requested family (NOERROR) or does not exist (NXDOMAIN).
    None(ResponseCode),
    /// No server sent a usable answer in time, or the CNAME chain is too long.
    Failed,
}

/// One resolver for each list of upstream servers.
pub(super) struct Upstreams {
    default: Vec<SocketAddr>,
    /// Ordered by last use, most recent first.
    lists: Mutex<Vec<(Vec<SocketAddr>, TokioResolver)>>,
    permits: Semaphore,
}

impl Upstreams {
    /// `default`: servers for policies that name none. If empty, the servers in /etc/resolv.conf are used.
    pub(super) fn new(default: Vec<SocketAddr>) -> Self {
        let default = match default[..] {
            [] => read_resolv_conf(&fs::read_to_string(RESOLV_CONF).unwrap_or_default()),
            _ => default,
        };
        Self {
            default,
            lists: Mutex::default(),
            permits: Semaphore::new(MAX_PENDING),
        }
    }

    /// Queries `servers`, or the default servers if `servers` is empty. `name` must be lower case without a trailing
    /// dot.
    pub(super) async fn ask(
        &self,
        servers: &[SocketAddr],
        name: &str,
        kind: RecordType,
    ) -> Outcome {
        let servers = match servers {
            [] => &self.default,
            servers => servers,
        };
        let Ok(name) = Name::from_labels(name.split('.').map(str::as_bytes)) else {
            return Outcome::None(ResponseCode::NXDomain);
        };
        let Ok(resolver) = self.resolver(servers) else {
            return Outcome::Failed;
        };
        let lookup = async {
            let _permit = self.permits.acquire().await;
            resolver.lookup(name.clone(), kind).await
        };
        match tokio::time::timeout(DEADLINE, lookup).await {
            Ok(Ok(found)) => addresses(found.answers(), name, kind),
            Ok(Err(NetError::Dns(DnsError::NoRecordsFound(none)))) => match none.response_code {
                code @ (ResponseCode::NoError | ResponseCode::NXDomain) => Outcome::None(code),
                _ => Outcome::Failed,
            },
            Ok(Err(_)) | Err(_) => Outcome::Failed,
        }
    }

    fn resolver(&self, servers: &[SocketAddr]) -> Result<TokioResolver, NetError> {
        let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lists.iter().position(|(list, _)| list == servers);
        let list = match known {
            Some(at) => lists.remove(at),
            None => (servers.to_vec(), resolver_of(servers)?),
        };
        let resolver = list.1.clone();
        lists.insert(0, list);
        lists.truncate(MAX_LISTS);
        Ok(resolver)
    }
}

fn resolver_of(servers: &[SocketAddr]) -> Result<TokioResolver, NetError> {
    let servers = servers.iter().map(|server| {
        let mut connections = vec![ConnectionConfig::udp(), ConnectionConfig::tcp()];
        connections.iter_mut().for_each(|c| c.port = server.port());
        NameServerConfig::new(server.ip(), true, connections)
    });
    let config = ResolverConfig::from_name_servers(servers.collect());
    let provider = TokioRuntimeProvider::default();
    TokioResolver::builder_with_config(config, provider)
        .with_options(options())
        .build()
}

fn options() -> ResolverOpts {
    let mut options = ResolverOpts::default();
    options.timeout = TIMEOUT;
    // One retry after the first attempt.
    options.attempts = 1;
    // If servers were queried one at a time, a dead server would use up the deadline.
    options.num_concurrent_reqs = 2;
    options.cache_size = CACHE_SIZE;
    options.max_active_requests = MAX_PENDING;
    // Guests must not see the names in the host's /etc/hosts.
    options.use_hosts_file = ResolveHosts::Never;
    options
}

/// Follows the CNAME chain from the queried name to its addresses. Ignores records of names outside the chain.
fn addresses(records: &[Record], asked: Name, kind: RecordType) -> Outcome {
    let mut name = asked;
    let mut ttl_s = u32::MAX;
    for _ in 0..=MAX_CHAIN {
        let of_name = || records.iter().filter(|record| record.name == name);
        let found: Vec<_> = of_name()
            .filter(|record| record.record_type() == kind)
            .filter_map(|record| Some((record.data.ip_addr()?, record.ttl)))
            .take(MAX_ADDRESSES)
            .collect();
        if !found.is_empty() {
            let ttl_s = found.iter().fold(ttl_s, |least, (_, ttl)| least.min(*ttl));
            return Outcome::Addresses {
                addresses: found.into_iter().map(|(address, _)| address).collect(),
                ttl: Duration::from_secs(ttl_s.into()),
            };
        }
        let next = of_name().find_map(|record| match &record.data {
            RData::CNAME(target) => Some((target.0.clone(), record.ttl)),
            _ => None,
        });
        let Some((target, ttl)) = next else {
            return Outcome::None(ResponseCode::NoError);
        };
        ttl_s = ttl_s.min(ttl);
        name = target;
    }
    Outcome::Failed
}

/// The name servers in a resolv.conf. If it has none, the loopback address (resolv.conf(5)).
fn read_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_whitespace();
        let is_server = words.next() == Some("nameserver");
        let address = words.next()?.parse::<IpAddr>().ok()?;
        is_server.then_some(SocketAddr::new(address, DNS_PORT))
    };
    let servers: Vec<_> = text.lines().filter_map(server).take(MAX_SERVERS).collect();
    match servers[..] {
        [] => vec![(Ipv4Addr::LOCALHOST, DNS_PORT).into()],
        _ => servers,
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::{A, CNAME};

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    fn alias(from: &str, to: &str, ttl: u32) -> Record {
        Record::from_rdata(name(from), ttl, RData::CNAME(CNAME(name(to))))
    }

    fn address(of: &str, last: u8, ttl: u32) -> Record {
        Record::from_rdata(name(of), ttl, RData::A(A([192, 0, 2, last].into())))
    }

    fn resolved(records: &[Record]) -> Outcome {
        addresses(records, name("a.test."), RecordType::A)
    }

    fn found(last: &[u8], ttl_s: u64) -> Outcome {
        Outcome::Addresses {
            addresses: last.iter().map(|n| [192, 0, 2, *n].into()).collect(),
            ttl: Duration::from_secs(ttl_s),
        }
    }

    #[test]
    fn only_records_in_the_cname_chain_count() {
        let records = [
            address("evil.test.", 66, 1),
            address("c.test.", 1, 300),
            alias("b.test.", "C.test.", 20),
            alias("A.test.", "b.test.", 100),
            address("c.test.", 2, 300),
        ];
        assert_eq!(resolved(&records), found(&[1, 2], 20));
        assert_eq!(
            resolved(&records[..1]),
            Outcome::None(ResponseCode::NoError)
        );
        assert_eq!(resolved(&[address("a.test.", 1, 0)]), found(&[1], 0));
    }

    #[test]
    fn chains_and_answers_have_a_maximum_length() {
        let chain = |length: u8| {
            let link = |n: u8| match n {
                0 => "a.test.".to_owned(),
                n => format!("x{n}.test."),
            };
            let mut records: Vec<_> = (0..length)
                .map(|n| alias(&link(n), &link(n + 1), 9))
                .collect();
            records.push(address(&link(length), 1, 9));
            records
        };
        assert_eq!(resolved(&chain(8)), found(&[1], 9));
        assert_eq!(resolved(&chain(9)), Outcome::Failed);
        assert_eq!(resolved(&[alias("a.test.", "a.test.", 9)]), Outcome::Failed);
        let many: Vec<_> = (0..100).map(|n| address("a.test.", n, 9)).collect();
        let Outcome::Addresses { addresses, .. } = resolved(&many) else {
            panic!("no addresses");
        };
        assert_eq!(addresses.len(), MAX_ADDRESSES);
    }

    #[test]
    fn a_resolv_conf_without_servers_means_this_host() {
        let text = "# x\nsearch a b\nnameserver 127.0.0.53\nnameserver fe80::1%eth0\nnameserver 2600::53 # y\n";
        let expected: Vec<SocketAddr> = ["127.0.0.53:53", "[2600::53]:53"]
            .map(|s| s.parse().unwrap())
            .into();
        assert_eq!(read_resolv_conf(text), expected);
        assert_eq!(
            read_resolv_conf("options rotate"),
            ["127.0.0.1:53".parse().unwrap()]
        );
    }

    #[tokio::test]
    async fn the_number_of_server_lists_is_limited() {
        let upstreams = Upstreams::new(Vec::new());
        for n in 0..=255 {
            upstreams.resolver(&[([192, 0, 2, n], 53).into()]).unwrap();
        }
        assert_eq!(upstreams.lists.lock().unwrap().len(), MAX_LISTS);
    }
}
