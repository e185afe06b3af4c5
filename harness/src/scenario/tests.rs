//! Contents of scenario files, and errors that name their mistakes.

use super::*;
use proptest::prelude::*;

fn refused(text: &str) -> String {
    let error = parse("t", text).unwrap_err();
    match std::error::Error::source(&error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

#[test]
fn an_empty_file_is_the_defaults() {
    let s = parse("t", "").unwrap();
    assert_eq!(s.name, "t");
    assert_eq!(s.arrival, Arrival::Burst { starts: 1 });
    assert_eq!(s.mode, Mode::Single);
    assert_eq!(s.baseline.unwrap().argv, ["/bin/echo", "ok"]);
    assert!(s.memory.is_none());
}

#[test]
fn every_shipped_scenario_loads() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../scenarios");
    let mut n = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        // The defaults are not a valid scenario: they set keys of several arrival kinds.
        let scenario = path
            .extension()
            .is_some_and(|extension| extension == "toml");
        if !scenario || path.ends_with("defaults.toml") {
            continue;
        }
        load(&path, None).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()));
        n += 1;
    }
    assert!(n >= 8, "{n}");
}

#[test]
fn unknown_keys_name_the_nearest() {
    insta::assert_snapshot!(refused("ruonds = 3"), @"scenario t: unknown key `ruonds`, the nearest known key is `rounds`");
    insta::assert_snapshot!(refused("[arrival]\nstart = 3"), @"scenario t: unknown key `arrival.start`, the nearest known key is `arrival.starts`");
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetrik='failures'\nlimit='0'"), @"scenario t: unknown key `gates.metrik`, the nearest known key is `gates.metric`");
}

#[test]
fn errors_name_the_invalid_value() {
    insta::assert_snapshot!(refused("rounds = 0"), @"scenario t: rounds is 0, it must be at least 1");
    insta::assert_snapshot!(refused("[arrival]\nkind='burst'\nworkers=4"), @"scenario t: arrival.workers has no meaning for kind \"burst\"");
    insta::assert_snapshot!(refused("[arrival]\nkind='steady'"), @"scenario t: arrival.rates_per_s is empty, it must name at least one rate");
    insta::assert_snapshot!(refused("[arrival]\nkind='steady'\nrates_per_s=[2,2]"), @"scenario t: arrival.rates_per_s must ascend");
    insta::assert_snapshot!(refused("[arrival]\nkind='steady'\nrates_per_s=[2,99999]"), @"scenario t: arrival.rates_per_s and arrival.lasts cause 5999940 starts in a round, at most 100000 are allowed");
    insta::assert_snapshot!(refused("[arrival]\nrates_per_s=[1]"), @r#"scenario t: arrival.rates_per_s has no meaning for kind "burst""#);
    insta::assert_snapshot!(refused("[target]\nkind='e2b'\nwatch='1ms'"), @"scenario t: target.watch reads the number of warm sandboxes: set target.warm");
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='first_exec.p96'\nlimit='1ms'"), @r#"scenario t: gate a: "first_exec.p96" is not a metric, the nearest one is `first_exec.p95`; docs/measure/measuring.md lists all under Gates"#);
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='memory.rrs'\nlimit='1MB'"), @r#"scenario t: gate a: "memory.rrs" is not a metric, the nearest one is `memory.rss`; docs/measure/measuring.md lists all under Gates"#);
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='hit_rate'\nlimit='0.9'"), @r#"scenario t: gate a: limit "0.9" is not a share such as "99%""#);
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='cpu_per_start'\nlimit='1ms'\naccepted='r'"), @r#"scenario t: gate a: cpu_per_start of one host is no limit for another: set host to the accepted run's, such as "AMD EPYC, 2 cores, Linux 6.1""#);
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='failures'\nlimit='0'\naccepted='r'"), @"scenario t: gate a: accepted has no meaning for failures: its limit is a goal");
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='failures'\nlimit='0'\nhost='h'"), @"scenario t: gate a: host has no meaning for a goal: remove it, or set accepted");
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='first_exec.p95'\nlimit='60'"), @"scenario t: gate a: limit \"60\" is not a duration with a unit such as \"60ms\"");
    insta::assert_snapshot!(refused("[hold]\nat_least='3'"), @r#"scenario t: hold.at_least: "3" is not a duration with a unit such as "250ms""#);
    assert!(refused("[hold]\nat_least=3").contains("invalid type: integer"));
    insta::assert_snapshot!(refused("[[turns]]\nname='a'"), @r#"scenario t: turn "a" needs exactly one of argv and cell"#);
    insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='turn.1.p50'\nlimit='1ms'"), @"scenario t: gate a: turn 1 does not exist, the scenario has 0 turns");
    insta::assert_snapshot!(refused("[mode]\nkind='forks'\n[[mode.parent]]\ncell='1'"), @r#"scenario t: mode "forks" needs target.kind "e2b""#);
    insta::assert_snapshot!(refused("[mode]\nkind='forks'\n[[mode.parent]]\nupload='a'\nto='b'"), @"scenario t: mode.parent: a step with upload needs an absolute path in `to` and no other key");
    insta::assert_snapshot!(refused("[mode]\nkind='beside'\nwith='host-process'\n[exec]\ncell='1'"), @r#"scenario t: mode.with "host-process": the host has no interpreter for cells"#);
    insta::assert_snapshot!(refused("[mode]\nkind='beside'\nwith='host-process'\nprefault='on'"), @r#"scenario t: mode.prefault has no meaning with "host-process""#);
    insta::assert_snapshot!(refused("cold_rounds=1\n[target]\nkind='e2b'\n[mode]\nkind='beside'\nwith='host-process'"), @r#"scenario t: cold_rounds cannot drop the template of a server from the page cache: set mode.kind to "beside" and mode.with to "vmm-direct""#);
    insta::assert_snapshot!(refused("[mode]\nkind='beside'\nwith='vmm-direct'\nprefault='on'"), @r#"scenario t: mode.with "vmm-direct" is the same as the target: set mode.prefault to the other value"#);
}

#[test]
fn a_cluster_and_its_events_are_checked() {
    let cluster =
        |more: &str| format!("[target]\nkind='e2b'\n[mode]\nkind='cluster'\nnodes=3\n{more}");
    insta::assert_snapshot!(refused("[mode]\nkind='cluster'\nnodes=2"), @r#"scenario t: mode "cluster" starts its nodes: it needs target.kind "e2b" without target.api_url"#);
    insta::assert_snapshot!(refused("[target]\nkind='e2b'\n[mode]\nkind='cluster'\nnodes=1"), @"scenario t: mode.nodes is 1, it must lie between 2 and 8");
    insta::assert_snapshot!(refused("[target]\nkind='e2b'\napi_url='http://h:1'\n[mode]\nkind='cluster'\nnodes=3"), @r#"scenario t: mode "cluster" starts its nodes: it needs target.kind "e2b" without target.api_url"#);
    insta::assert_snapshot!(refused(&cluster("by=['d']")), @r#"scenario t: mode.by: the cluster has no node "d", its 3 nodes are a, b and so on"#);
    insta::assert_snapshot!(refused("[mode]\nclosed=['a']"), @r#"scenario t: mode.closed has no meaning for kind "single""#);
    insta::assert_snapshot!(refused("[target]\nkind='e2b'\n[hold]\nuntil='exec'\n[mode]\nkind='systems'\n[[mode.systems]]\nname='p'\nkind='e2b'\nby=['a']"), @r#"scenario t: system p: by names nodes of a cluster: set mode.kind to "cluster""#);
    insta::assert_snapshot!(refused(&cluster("[[mode.templates]]\ntemplate='a'")), @r#"scenario t: mode.templates has no meaning for kind "cluster""#);
    insta::assert_snapshot!(refused("[mode.event]\nkind='kill-node'"), @r#"scenario t: mode.event has no meaning for kind "single""#);
    assert!(refused(&cluster("[mode.event]\nrunning=2")).contains("missing field `kind`"));
    insta::assert_snapshot!(refused(&cluster("[mode.event]\nkind='kill-node'\npaused=1")), @"scenario t: mode.event.paused is 1, but only sandboxes that run can be lost: set mode.event.running");
    insta::assert_snapshot!(refused(&cluster("[mode.event]\nkind='drain-node'\nrunning=0")), @"scenario t: mode.event.running is 0, it must lie between 1 and 1000");
    insta::assert_snapshot!(refused(&cluster("[[gates]]\nname='g'\nmetric='event.gap.p95'\nlimit='1s'")), @"scenario t: gate g: event.gap.p95 needs an event: set mode.event.kind to \"drain-node\"");
    let s = parse("t", &cluster("by=['a','b']\n[mode.event]\nkind='drain-node'\nafter='50ms'\npaused=2\nwritten='1MiB'\n[[gates]]\nname='g'\nmetric='event.lost'\nlimit='0'")).unwrap();
    let event = s.event().unwrap();
    assert_eq!(
        (event.running, event.paused, event.written.0),
        (1, 2, 1 << 20)
    );
    assert_eq!(event.after, Duration::from_millis(50));
    assert_eq!(s.gates[0].metric.to_string(), "event.lost");
}

/// A scenario with an isolated network and one turn, followed by `more`.
fn networked(turn: &str, more: &str) -> String {
    format!(
        "[target]\nkind='e2b'\nwarm=1\n[network]\nkind='isolated'\n[[turns]]\nname='a'\n{turn}\n{more}"
    )
}

#[test]
fn exchanges_reject_missing_and_meaningless_keys() {
    insta::assert_snapshot!(refused("[[turns]]\nname='a'\nexchange='echo'\ncount=1"), @r#"scenario t: turn "a" is an exchange, which needs network.kind "isolated""#);
    insta::assert_snapshot!(refused("[network]\nkind='isolated'"), @r#"scenario t: network.kind "isolated" needs target.kind "e2b" without target.api_url"#);
    insta::assert_snapshot!(refused(&networked("exchange='echo'", "")), @r#"scenario t: turn "a": count is required for exchange "echo""#);
    insta::assert_snapshot!(refused(&networked("exchange='send'\namount='1MB'\ncount=1", "")), @r#"scenario t: turn "a": count has no meaning for exchange "send""#);
    insta::assert_snapshot!(refused(&networked("exchange='send'\namount='1'", "")), @r#"scenario t: turn "a": amount: "1" is not a size: write a whole number and one of B, KiB, MiB, GiB, KB, MB, GB"#);
    insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=0", "")), @r#"scenario t: turn "a": count is 0, it must lie between 1 and 1000000"#);
    insta::assert_snapshot!(refused(&networked("exchange='denied'\nrepeat=2", "")), @r#"scenario t: turn "a": repeat is only allowed for echo, send and receive"#);
    insta::assert_snapshot!(refused(&networked("exchange='shout'", "")), @r#"scenario t: turn "a": exchange is "shout", it must be echo, send, receive, denied or churn"#);
    insta::assert_snapshot!(refused(&networked("exchange='denied'\ncell='1'", "")), @r#"scenario t: turn "a" is an exchange and cannot have argv, cell or expect_stdout"#);
    insta::assert_snapshot!(refused(&networked("exchange='denied'", "[mode]\nkind='beside'\nwith='vmm-direct'")), @r#"scenario t: turn "a" needs a network policy, and comparison clones have none: set mode.kind to "single""#);
    insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=1", "[mode]\nkind='beside'\nwith='vmm-direct'\n[arrival]\nstarts=2")), @"scenario t: arrival starts up to 2 clones at once, but only one comparison clone can have a network");
    insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=1", "[[gates]]\nname='g'\nmetric='turn.1.ratio'\nlimit='1.1'")), @r#"scenario t: gate g: a ratio of turns needs comparison rounds: set mode.kind to "beside""#);
    let s = parse(
        "t",
        &networked("exchange='churn'\ncount=3\nevery='2ms'", ""),
    )
    .unwrap();
    let every = Duration::from_millis(2);
    assert_eq!(
        s.turns[0].exchange,
        Some(ExchangeSpec::Churn { count: 3, every })
    );
    let options = s.network.unwrap().options();
    assert_eq!(options["denyOut"][0], "0.0.0.0/0");
}

#[test]
fn a_turn_can_be_repeated_and_limited_by_a_gate() {
    let text = "[[turns]]\nname='w'\ncell='1'\nexpect_stdout='1'\ntimes=2\n[[gates]]\nname='g'\nmetric='turn.2.p95'\nlimit='1ms'";
    let s = parse("t", text).unwrap();
    let names: Vec<_> = s.turns.iter().map(|turn| turn.name.as_str()).collect();
    assert_eq!(names, ["w 1", "w 2"]);
    assert_eq!(s.turns[1].exec.cell.as_deref(), Some("1"));
    assert_eq!(s.turns[1].exec.timeout, s.exec.timeout);
    assert_eq!(s.gates[0].metric, Metric::Turn(2, Quantile::P95));
    assert_eq!(s.gates[0].metric.to_string(), "turn.2.p95");
}

proptest! {
    #[test]
    fn hostile_text_is_rejected_without_panic(text in "[a-z_\\[\\]=\"0-9. \n]{0,200}") {
        let _ = parse("fuzz", &text);
    }

    #[test]
    fn hostile_values_are_rejected_without_panic(
        key in prop::sample::select(vec!["seed", "rounds", "arrival.starts", "arrival.rate_per_s",
            "arrival.kind", "hold.until", "memory.stop_at_share", "exec.argv", "target.memory"]),
        value in prop::sample::select(vec!["-1", "0", "1e308", "nan", "\"\"", "[]", "99999999999",
            "\"x\"", "true", "[1]", "{}", "1979-05-27"]),
    ) {
        let _ = parse("fuzz", &format!("{key} = {value}"));
    }
}

#[test]
fn a_file_of_an_earlier_version_is_the_same_scenario() {
    for (earlier, current) in [
        (
            "[beside]\nkind='vmm-direct'\nprefault='off'",
            "[mode]\nkind='beside'\nwith='vmm-direct'\nprefault='off'",
        ),
        (
            "[hold]\nuntil='exec'\n[[peers]]\nname='p'\nkind='process'",
            "[hold]\nuntil='exec'\n[mode]\nkind='systems'\n[[mode.systems]]\nname='p'\nkind='process'",
        ),
        (
            "[target]\nkind='e2b'\n[[parent]]\ncell='1'",
            "[target]\nkind='e2b'\n[mode]\nkind='forks'\n[[mode.parent]]\ncell='1'",
        ),
        (
            "[target]\nkind='e2b'\n[[mix]]\ntemplate='a'",
            "[target]\nkind='e2b'\n[mode]\nkind='mix'\n[[mode.templates]]\ntemplate='a'",
        ),
        (
            "[target]\nkind='e2b'\nnodes=2\nby=['a']\n[event]\nkind='drain-node'",
            "[target]\nkind='e2b'\n[mode]\nkind='cluster'\nnodes=2\nby=['a']\n[mode.event]\nkind='drain-node'",
        ),
        (
            "[beside]\nkind='none'\n[event]\nkind='none'\n[target]\nnodes=0",
            "",
        ),
    ] {
        let found = parse("t", earlier).unwrap_or_else(|e| panic!("{e:?}: {earlier}"));
        assert_eq!(found, parse("t", current).unwrap(), "{earlier}");
        let typed = earlier.parse().unwrap();
        let rewritten = mode::converted(&typed).unwrap().unwrap();
        assert_eq!(mode::converted(&rewritten), Ok(None), "{earlier}");
    }
    insta::assert_snapshot!(refused("[target]\nkind='e2b'\n[beside]\nkind='host-process'\n[[mix]]\ntemplate='a'"), @"scenario t: a scenario has one mode, and this one has the tables of several: beside, mix");
}

#[test]
fn a_scenario_recorded_by_an_earlier_version_has_its_mode() {
    let recorded = |current: &str, keys: serde_json::Value, target: serde_json::Value| {
        let current = parse("t", current).unwrap();
        let mut earlier = serde_json::to_value(&current).unwrap();
        earlier.as_object_mut().unwrap().remove("mode");
        for (at, keys) in [("", keys), ("/target", target)] {
            let object = earlier.pointer_mut(at).unwrap().as_object_mut().unwrap();
            object.extend(keys.as_object().unwrap().clone());
        }
        let found: Scenario = serde_json::from_value(earlier).unwrap();
        assert_eq!(found, current);
    };
    let none = || serde_json::json!({});
    recorded(
        "",
        serde_json::json!({ "beside": null, "peers": [], "mix": [] }),
        none(),
    );
    recorded(
        "[mode]\nkind='beside'\nwith='vmm-direct'\nprefault='off'",
        serde_json::json!({ "beside": "vmm-direct", "beside_prefault": "off" }),
        none(),
    );
    recorded(
        "[target]\nkind='e2b'\n[mode]\nkind='cluster'\nnodes=3\nclosed=['a']",
        serde_json::json!({ "peers": [], "event": null }),
        serde_json::json!({ "nodes": 3, "by": [], "closed": ["a"] }),
    );
}

#[test]
fn a_file_with_a_gate_that_it_cannot_decide_is_refused_and_a_change_on_the_command_line_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("few.toml");
    let gate = "[[gates]]\nname = \"tail\"\nmetric = \"first_exec.p99\"\nlimit = \"1s\"\n";
    let file = |starts| format!("[arrival]\nkind = \"closed\"\nstarts = {starts}\n{gate}");
    std::fs::write(&path, file(20)).unwrap();
    let refused = load(&path, None).unwrap_err().to_string();
    assert!(
        refused.contains("few: gate tail: first_exec.p99 can never be decided"),
        "{refused}"
    );
    std::fs::write(&path, file(500)).unwrap();
    load(&path, None).unwrap();
    let fewer: Change = "arrival.starts=20".parse().unwrap();
    let tried = load_changed(&path, None, &[fewer]).unwrap();
    assert_eq!(undecidable(&tried).len(), 1);
}
