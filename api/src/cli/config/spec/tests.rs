use api::serve::ServeSpec;
use ipnet::IpNet;
use model::Bytes;

use super::{super::earlier::FlagText, *};

/// The result for keys that are set as by `--set`.
fn spec_with(sockets: Vec<(SocketAddr, TcpListener)>, set: &[&str]) -> Result<ServeSpec, String> {
    let set = ["pool.vmm=/bin/true"].iter().chain(set);
    let flags = set
        .map(|text| FlagText::of_set((*text).to_owned()))
        .collect();
    let layers = Layers::load(None, Path::new("/no/such/cube.toml"), flags);
    let config = layers.config().map_err(|why| why.to_string())?;
    let found = spec(&config, &layers, Path::new("/nowhere/cube-api"), sockets);
    found.map_err(|why| why.to_string())
}

fn spec_of(set: &[&str]) -> Result<ServeSpec, String> {
    spec_with(Vec::new(), set)
}

#[test]
fn authentication_can_be_turned_off_on_loopback_only() {
    let open = spec_of(&["server.insecure_loopback=true"]).unwrap();
    assert_eq!(open.auth, Auth::Open);
    let addresses = ["server.listen=[::1]:1", "server.listen=0.0.0.0:1"];
    let mut wide = vec!["server.insecure_loopback=true"];
    wide.extend(addresses);
    assert!(
        spec_of(&wide)
            .unwrap_err()
            .contains("0.0.0.0:1 is not a loopback")
    );
    assert!(matches!(
        spec_of(&addresses).unwrap().auth,
        Auth::Keys { .. }
    ));
}

#[test]
fn warm_slots_follow_demand_unless_an_option_forbids_it() {
    let pool = |options: &[&str]| spec_of(options).unwrap().pool;
    let (usual, none) = (pool(&[]), WarmMarks::default());
    assert_eq!((usual.warm, usual.warm_in_use), (none, none));
    assert_eq!(usual.warm_spare, WARM);
    assert_eq!((usual.warm_slots, usual.warm_memory), (128, None));
    // The marks apply to all templates in use.
    let marks = WarmMarks { low: 1, high: 3 };
    let named = pool(&["pool.warm=1:3", "pool.max_sandboxes=20"]);
    assert_eq!((named.warm, named.warm_in_use), (marks, marks));
    assert_eq!(named.warm_spare, none);
    assert_eq!(named.warm_slots, 10);
    let off = pool(&["pool.warm=0:0"]);
    assert_eq!((off.warm, off.warm_slots), (none, 0));
    let budget = pool(&[
        "pool.warm=0:0",
        "pool.warm_slots=7",
        "pool.warm_memory=1GiB",
    ]);
    assert_eq!((budget.warm, budget.warm_slots), (none, 7));
    assert_eq!(budget.warm_memory, Some(Bytes::mib(1024)));
}

#[test]
fn limits_hold_unless_an_option_lifts_them() {
    let usual = spec_of(&[]).unwrap().pool;
    assert_eq!(usual.missing_limits, MissingLimits::Refuse);
    assert_eq!(usual.limits.io_bytes_per_s, Some(256 << 20));
    assert_eq!((usual.limits.cpu_weight, usual.limits.layer), (100, None));
    assert_eq!(
        (usual.disk_reserve, usual.max_saved),
        (Bytes::mib(1024), 1000)
    );
    assert_eq!(spec_of(&["pool.max_saved=9"]).unwrap().pool.max_saved, 9);
    let quota = |options: &[&str]| spec_of(options).unwrap().pool.template_quota;
    assert_eq!(quota(&[]), None);
    assert_eq!(quota(&["pool.template_quota=1GiB"]), Some(Bytes::mib(1024)));
    let rate = |options: &[&str]| spec_of(options).unwrap().network.unwrap().bytes_per_s;
    assert_eq!(rate(&[]), Some(64 << 20));
    assert_eq!(rate(&["sandbox.network_rate=1MiB"]), Some(1 << 20));
    assert_eq!(rate(&["sandbox.network_rate=none"]), None);
    assert_eq!(usual.server_memory, Some(Bytes::mib(2048)));
    let lifted = [
        "sandbox.io_rate=none",
        "server.memory=none",
        "sandbox.allow_missing_limits=true",
        "sandbox.cpu_weight=7",
    ];
    let lifted = spec_of(&lifted).unwrap().pool;
    assert_eq!(lifted.missing_limits, MissingLimits::Allow);
    assert_eq!(
        (lifted.limits.io_bytes_per_s, lifted.limits.cpu_weight),
        (None, 7)
    );
    assert_eq!(lifted.server_memory, None);
    assert!(
        spec_of(&["server.memory=63MiB"])
            .unwrap_err()
            .contains("64MiB")
    );
    let small = spec_of(&["sandbox.disk=1GiB", "sandbox.io_rate=1MiB"])
        .unwrap()
        .pool
        .limits;
    assert_eq!(
        (small.layer, small.io_bytes_per_s),
        (Some(Bytes::mib(1024)), Some(1 << 20))
    );
    assert!(spec_of(&["sandbox.io_rate=much"]).is_err());
}

#[test]
fn more_sandboxes_than_can_have_a_network_are_refused_by_the_name_of_their_key() {
    let most = |set: &[&str]| spec_of(set).map(|spec| spec.pool.max_sandboxes);
    assert_eq!(most(&["pool.max_sandboxes=6000"]), Ok(6000));
    assert_eq!(most(&["pool.max_sandboxes=15808"]), Ok(15_808));
    let why = most(&["pool.max_sandboxes=15809"]).unwrap_err();
    let parts = ["--set: pool.max_sandboxes: ", "15809", "at most 15808"];
    for part in parts {
        assert!(why.contains(part), "{part}: {why}");
    }
    let without = ["pool.max_sandboxes=20000", "network.mode=none"];
    assert_eq!(most(&without), Ok(20_000));
}

#[test]
fn sockets_of_systemd_replace_the_default_and_must_match_named_addresses() {
    let [a, b]: [SocketAddr; 2] = ["127.0.0.1:1", "[::]:2"].map(|a| a.parse().unwrap());
    let layers = Layers::default();
    let addresses = |named: &[SocketAddr], bound: &[SocketAddr]| {
        let mut checks = Checks {
            layers: &layers,
            mistakes: Vec::new(),
        };
        let found = addresses_of(named, bound.to_vec(), &mut checks);
        let mistake = checks.mistakes.first().map(Mistake::to_string);
        mistake.map_or(Ok(found), Err)
    };
    assert_eq!(addresses(&[], &[]).unwrap(), [LISTEN]);
    assert_eq!(addresses(&[a], &[]).unwrap(), [a]);
    assert_eq!(addresses(&[], &[b]).unwrap(), [b]);
    assert_eq!(addresses(&[a, b], &[b, a]).unwrap(), [b, a]);
    let why = addresses(&[a], &[a, b]).unwrap_err();
    assert!(why.contains("127.0.0.1:1, [::]:2"), "{why}");
}

#[test]
fn without_authentication_a_socket_of_systemd_must_be_on_loopback() {
    let socket = TcpListener::bind("0.0.0.0:0").unwrap();
    let sockets = vec![(socket.local_addr().unwrap(), socket)];
    let why = spec_with(sockets, &["server.insecure_loopback=true"]);
    assert!(why.unwrap_err().contains("not a loopback"));
}

#[test]
fn incomplete_and_contradictory_options_are_refused() {
    assert!(spec_of(&["tls.certificate=/a"]).is_err());
    assert!(spec_of(&["pool.warm=4:2"]).is_err());
    assert!(spec_of(&["pool.warm=3"]).is_err());
    assert!(spec_of(&["pool.templates=/nonexistent"]).is_err());
    assert!(spec_of(&["network.mode=none", "network.uplinks=eth0"]).is_err());
    let none = [
        "network.mode=none",
        "network.uplinks=eth0",
        "sandbox.network_rate=1MiB",
        "traces.share=2",
        "alerts.refusals=1",
    ];
    let why = spec_of(&none).map(drop).unwrap_err();
    for key in [
        "uplinks",
        "network_rate",
        "traces.share",
        "also set alerts.to",
    ] {
        assert!(why.contains(key), "{key}: {why}");
    }
    assert!(spec_of(&["server.trusted_proxies=proxy.example"]).is_err());
    let proxies = [
        "server.trusted_proxies=10.1.2.3",
        "server.trusted_proxies=fd00::1/8",
    ];
    let proxies = spec_of(&proxies).unwrap().trusted_proxies;
    assert_eq!(
        proxies,
        [
            "10.1.2.3/32".parse::<IpNet>().unwrap(),
            "fd00::/8".parse().unwrap()
        ]
    );
    assert!(spec_of(&["pool.images=/nonexistent"]).is_err());
    assert!(spec_of(&["sandbox.cpu_weight=0"]).is_err());
    let warm = spec_of(&["pool.warm=0:3"]).unwrap().pool.warm;
    assert_eq!(warm, WarmMarks { low: 0, high: 3 });
}
