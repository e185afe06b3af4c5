//! Connections of the proxy's process, whatever code it runs. A child process is the proxy.

use std::{
    env,
    io::{BufRead, BufReader, Write, stdin},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd, OwnedFd},
    process::{Child, Command, Stdio},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};

use super::{
    stack::Stack,
    sys,
    world::{PATIENCE, PEER4, PEER6, WAN4, WAN6, World, config, in_namespace, ip},
};
use crate::{
    Access, Destinations, ForbiddenAddresses, Isolation, IsolationConfig, Policy, Protocol,
    datapath::proxy_group::ProxyGroup,
};

/// Tells the child process below that it is the proxy.
const PROXY: &str = "CUBE_TEST_PROXY";
const DENIED: &str = "198.51.100.9";
/// Result of a connection that the programs allow, and that gets no answer.
const ALLOWED: &str = "EINPROGRESS";
const REFUSED: &str = "EPERM";

/// Starts to connect. A connection to a listener on this host is usually complete when the call returns.
fn begin(socket: &OwnedFd, to: SocketAddr) -> nix::Result<()> {
    connect(socket.as_raw_fd(), &SockaddrStorage::from(to))
}

fn stream_socket(to: IpAddr) -> OwnedFd {
    let family = match to {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    socket(family, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).unwrap()
}

/// The proxy: connects to each address that it reads, and writes the result. Does nothing unless a test started it.
#[test]
fn proxy_process_for_the_tests_of_connections() {
    if env::var_os(PROXY).is_none() {
        return;
    }
    for line in stdin().lines() {
        let to: SocketAddr = line.unwrap().parse().unwrap();
        let result = match begin(&stream_socket(to.ip()), to) {
            Ok(()) => "connected".to_owned(),
            Err(errno) => format!("{errno:?}"),
        };
        eprintln!("{result}");
    }
}

struct Proxy {
    child: Child,
    results: BufReader<std::process::ChildStderr>,
}

impl Proxy {
    fn start() -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "--nocapture",
                "tests::connections::proxy_process_for_the_tests_of_connections",
            ])
            .env(PROXY, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let results = BufReader::new(child.stderr.take().unwrap());
        Self { child, results }
    }

    fn connect(&mut self, to: SocketAddr) -> String {
        let mut input = self.child.stdin.as_ref().unwrap();
        writeln!(input, "{to}").unwrap();
        let mut line = String::new();
        self.results.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    #[track_caller]
    fn check(&mut self, address: &str, expected: &str) {
        assert_eq!(
            self.connect((ip(address), 80).into()),
            expected,
            "{address}"
        );
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

fn with_proxy(opened: SocketAddr, denied: &str) -> IsolationConfig {
    let block = |address: IpAddr, access| Destinations {
        block: address.into(),
        access,
    };
    let port = Access {
        protocol: Protocol::Tcp,
        first: opened.port(),
        last: opened.port(),
    };
    let exceptions = vec![block(opened.ip(), vec![port])];
    let denied = vec![block(ip(denied), Vec::new())];
    IsolationConfig {
        proxy: true,
        forbidden: ForbiddenAddresses::new(exceptions, denied),
        ..config()
    }
}

#[test]
fn net_the_kernel_refuses_connections_of_the_proxy_to_forbidden_addresses() {
    in_namespace(|| {
        let service = TcpListener::bind("127.0.0.1:0").unwrap();
        let opened = service.local_addr().unwrap();
        let world = World::with(with_proxy(opened, DENIED));
        let mut proxy = Proxy::start();
        // Outside of the group, the process can connect anywhere.
        proxy.check("10.0.0.1", ALLOWED);
        let unlimited = world.isolation.unlimited_proxy();
        assert!(unlimited.is_none(), "{unlimited:?}");
        world.isolation.limit_proxy(proxy.child.id()).unwrap();
        for allowed in [PEER4, PEER6, &format!("::ffff:{PEER4}"), "192.0.2.1"] {
            proxy.check(allowed, ALLOWED);
        }
        assert_ne!(proxy.connect(opened), REFUSED);
        service.accept().unwrap();
        for refused in [
            "10.0.0.1",
            "169.254.169.254",
            "127.0.0.1",
            "127.0.0.2",
            "0.0.0.0",
            "198.18.0.1",
            WAN4,
            DENIED,
            "::ffff:10.0.0.1",
            &format!("::ffff:{WAN4}"),
            &format!("::ffff:{DENIED}"),
            "::",
            "::1",
            WAN6,
            "fd00::1",
            "fe80::1",
            "64:ff9b::a00:1",
        ] {
            proxy.check(refused, REFUSED);
        }

        // The programs outlive the server, and the next one replaces them and their rules without a gap.
        let World {
            isolation,
            config,
            events,
            ..
        } = world;
        drop((isolation, events));
        proxy.check("10.0.0.1", REFUSED);
        let next = IsolationConfig {
            forbidden: with_proxy(opened, PEER4).forbidden,
            ..config
        };
        let (isolation, _events) = Isolation::open(&next).unwrap();
        for (address, expected) in [("10.0.0.1", REFUSED), (PEER4, REFUSED), (DENIED, ALLOWED)] {
            proxy.check(address, expected);
        }

        // The last server removes the group and the links with the last proxy.
        drop(proxy);
        drop(isolation);
        let group = ProxyGroup::find(&next).unwrap();
        assert!(!group.dir.exists() && !group.links.exists(), "{group:?}");
    });
}

/// The programs do not judge a socket that the server made.
#[test]
fn net_an_accepted_socket_that_connects_again_reaches_no_service_of_the_host() {
    in_namespace(|| {
        let world = World::with(IsolationConfig {
            proxy: true,
            ..config()
        });
        let policy = Policy {
            names: vec!["good.test".parse().unwrap()],
            ..Policy::default()
        };
        let guest = world.guest(&policy);
        let day = std::time::Duration::from_secs(86400);
        let pinned = world
            .isolation
            .pin(guest.index, &guest.sandbox, ip(PEER4), "good.test", day);
        pinned.unwrap();
        let stack = Stack::new(&guest, 0);
        let listener = world.isolation.proxy_listener().unwrap();
        let remote = SocketAddr::new(ip(PEER4), 443);
        let _of_guest = stack.run(move || TcpStream::connect_timeout(&remote, PATIENCE).unwrap());
        let (accepted, _) = listener.accept().unwrap();
        let service = TcpListener::bind("[::]:0").unwrap();
        let own = accepted.local_addr().unwrap().ip();
        let to = SocketAddr::new(own, service.local_addr().unwrap().port());
        sys::disconnect(&accepted).unwrap();
        accepted.set_nonblocking(true).unwrap();
        let accepted = OwnedFd::from(accepted);
        let begun = begin(&accepted, to);
        assert!(matches!(begun, Err(nix::Error::EINPROGRESS)), "{begun:?}");
        // The service accepts connections in the order in which they were completed.
        let other = TcpStream::connect(to).unwrap();
        let (_, peer) = service.accept().unwrap();
        assert_eq!(peer, other.local_addr().unwrap());
    });
}
