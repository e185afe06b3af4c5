//! Snapshots of all reports of one synthetic run on one synthetic host.

#[path = "support/exchanged.rs"]
mod exchanged;
#[path = "support/recorded.rs"]
mod recorded;

use std::path::Path;

use harness::{
    compare::{self, CompareError, Side},
    event::{Happened, RunEvent},
    gate::Verdict,
    host::facts::{self, BuildFacts, HostFacts},
    plan::Row,
    report::{Strictness, View, comparison, document::Document, html, junit, markdown, terminal},
    scenario::{EventCount, EventTime, Place, TargetKind},
    summary::fold::{Summary, fold},
};
use testbed::exit::End;

fn host() -> HostFacts {
    let mut host = facts::read(Path::new("/no/such"));
    host.probe.platform = Some(model::Platform::Ring3);
    host.probe.why = "ring 3 native, ring 0 emulated".into();
    host.kvm_missing = None;
    host.cpu_model = Some("Invented CPU".into());
    host.cores = 2;
    host.virtual_machine = Some(true);
    host.governor = None;
    host.ksm_runs = Some(false);
    host.damon_actions.clear();
    host.clock_source = Some("tsc".into());
    host.transparent_huge_pages = Some("madvise".into());
    host.kernel = Some("6.1.0".into());
    host.cgroup_cpu_cores = None;
    host.meminfo = [("MemTotal".to_owned(), 24_000_000_000)].into();
    host.load_1min = Some(0.1);
    for sum in host.binaries.values_mut() {
        *sum = "0".repeat(64);
    }
    host.commit = Some("0123456".into());
    host.dirty_tree = Some(false);
    host.debug_build = false;
    host
}

fn shown(render: impl Fn(&View<'_>) -> String) -> String {
    let (summary, host) = (fold(&recorded::events(6)), host());
    render(&View::new(&summary, &host).expect("the events begin with a start"))
}

#[test]
fn terminal_report() {
    insta::assert_snapshot!(shown(terminal::render));
}

#[test]
fn markdown_report() {
    insta::assert_snapshot!(shown(markdown::render));
}

#[test]
fn junit_report() {
    insta::assert_snapshot!(shown(junit::render));
}

#[test]
fn json_report() {
    insta::assert_snapshot!(shown(|view| Document::new(view).render()));
}

#[test]
fn the_html_page_is_complete_and_escapes_its_contents() {
    let page = shown(html::render);
    assert_eq!(page.matches("<svg").count(), 4);
    assert!(page.contains("cannot be reached &lt;here&gt;"));
    assert!(!page.contains("<here>") && !page.contains("http://") && !page.contains("<script"));
    assert!(
        !page.contains("NaN") && !page.contains("inf"),
        "every coordinate is a number"
    );
}

#[test]
fn a_run_without_a_start_that_counts_is_inconclusive_with_and_without_gates() {
    let host = host();
    let mut summary = fold(&recorded::events(6));
    summary.clones.clear();
    let mut view = View::new(&summary, &host).unwrap();
    assert_eq!(view.end(), End::Inconclusive);
    view.gates.clear();
    assert_eq!(view.end(), End::Inconclusive, "no gate was missed");
}

#[test]
fn reports_of_empty_and_killed_runs_do_not_panic() {
    let host = host();
    for keep in [1, 2, 3, 10, 30] {
        let events = recorded::events(2);
        let summary = fold(&events[..keep]);
        let view = View::new(&summary, &host).unwrap();
        assert_eq!(Document::new(&view).ended, "killed");
        for render in [
            terminal::render,
            markdown::render,
            junit::render,
            html::render,
        ] {
            assert!(!render(&view).contains("NaN"));
        }
    }
    assert!(View::new(&Summary::default(), &host).is_none());
}

#[test]
fn a_run_compared_with_itself_is_no_regression() {
    let (summary, host) = (fold(&recorded::events(8)), host());
    let side = Side {
        summary: &summary,
        facts: &host,
    };
    let comparison = compare::compare(side, side, 0.1).unwrap();
    insta::assert_snapshot!(comparison.render());
    let mut other = host.clone();
    other.kernel = None;
    let other = Side {
        facts: &other,
        ..side
    };
    assert!(matches!(
        compare::compare(side, other, 0.1),
        Err(CompareError::Host { .. })
    ));
}

#[test]
fn a_missed_time_is_excused_only_below_publishable_and_only_if_not_strict() {
    let mut summary = fold(&recorded::events(20));
    for clone in &mut summary.clones {
        clone.failure = None;
    }
    let end = |summary: &Summary, host: &HostFacts, strictness| {
        let mut view = View::new(summary, host).expect("the events begin with a start");
        view.strictness = strictness;
        // All starts succeed, and P95 is missed.
        view.gates.truncate(2);
        let time = &view.gates[1];
        assert_eq!(
            (time.metric.as_str(), time.verdict),
            ("first_exec.p95", Verdict::Missed)
        );
        (view.end(), view.is_excused())
    };
    let mut host = host();
    let excused = (End::Inconclusive, true);
    let failed = (End::GateFailed, false);
    assert_eq!(end(&summary, &host, Strictness::Excused), excused);
    assert_eq!(end(&summary, &host, Strictness::Strict), failed);
    host.virtual_machine = Some(false);
    host.cores = 64;
    // One round of bursts is planned, so its quantiles may not be published on any host.
    assert_eq!(end(&summary, &host, Strictness::Excused), excused);
    if let Some(started) = &mut summary.started {
        started.scenario.rounds = 20;
    }
    assert_eq!(end(&summary, &host, Strictness::Excused), failed);
}

/// Failures of B count in the quantiles and in the verdict.
#[test]
fn a_run_that_fails_more_often_is_never_as_good() {
    let host = host();
    let a = fold(&recorded::events(12));
    let with_failures = |every: usize| {
        let mut b = a.clone();
        for clone in b.clones.iter_mut().step_by(every) {
            clone.timeline = model::Timeline::default();
            clone.failure = Some(harness::event::Failure {
                cause: harness::event::FailureCause::Exec,
                message: "x".into(),
            });
        }
        b
    };
    let compared = |b: &Summary| compare::compare(side(&a, &host), side(b, &host), 0.1).unwrap();
    let rare = compared(&with_failures(100));
    assert_eq!(
        rare.failures.verdict,
        compare::Outcome::Inconclusive,
        "{rare:?}"
    );
    assert_ne!(rare.end(), End::Pass);
    let often = compared(&with_failures(8));
    assert_eq!(often.failures.verdict, compare::Outcome::Fail);
    let slow = with_failures(8);
    let page = comparison::render(
        &often,
        [side(&a, &host), side(&slow, &host)],
        ["results/a", "<b>"],
    );
    assert!(page.contains("<td class=\"fail\">fail</td>") && page.contains("results/a"));
    assert!(
        page.contains("&lt;b&gt;") && !page.contains("<b>"),
        "names are escaped"
    );
    assert_eq!(
        page.matches("class=\"curve\"").count(),
        4,
        "two phases of two runs"
    );
    let p95 = often.metrics.iter().find(|m| m.metric == "first_exec.p95");
    let p95 = p95.expect("a quantile among failures is not left out");
    assert_eq!((p95.b, p95.verdict), (None, compare::Outcome::Fail));
    assert_eq!(often.end(), End::GateFailed);
    // Descriptions and gates do not affect measurements.
    let mut described = a.clone();
    let started = described.started.as_mut().expect("a start");
    started.scenario.description = "another".into();
    started.scenario.gates.clear();
    compared(&described);
}

#[test]
fn a_gate_on_the_ratio_of_a_turn_passes_fails_or_is_inconclusive() {
    let (summary, mut host) = (fold(&exchanged::events(12)), host());
    let verdicts = |host: &HostFacts| {
        let view = View::new(&summary, host).expect("the events begin with a start");
        view.gates
            .iter()
            .map(|gate| gate.verdict)
            .collect::<Vec<_>>()
    };
    let (pass, fail, open) = (Verdict::Met, Verdict::Missed, Verdict::Inconclusive);
    assert_eq!(verdicts(&host), [pass, fail, open]);
    host.debug_build = true;
    assert_eq!(verdicts(&host), [open; 3], "the host is unfit");
    let few = fold(&exchanged::events(9));
    host.debug_build = false;
    let view = View::new(&few, &host).expect("the events begin with a start");
    assert!(view.gates.iter().all(|gate| gate.verdict == open));
}

#[test]
fn ratios_are_in_every_report() {
    let (summary, host) = (fold(&exchanged::events(12)), host());
    let view = View::new(&summary, &host).expect("the events begin with a start");
    insta::assert_snapshot!(terminal::render(&view));
    for text in [markdown::render(&view), html::render(&view)] {
        for cell in ["turn request", "1.050", "1.500", "MB/s plain"] {
            assert!(text.contains(cell), "{cell}: {text}");
        }
    }
    let document = Document::new(&view);
    let ratios: Vec<_> = document.turn_ratios.iter().map(|r| r.ratio).collect();
    assert_eq!(ratios, [Some(1.05), Some(1.5), Some(1.0)]);
    assert!(document.turns.is_some_and(|turns| turns.tax.is_none()));
}

#[test]
fn a_breach_determines_the_exit_code() {
    let (summary, host) = (fold(&exchanged::breached()), host());
    let view = View::new(&summary, &host).expect("the events begin with a start");
    assert_eq!(view.end(), End::Breach);
}

fn side<'a>(summary: &'a Summary, facts: &'a HostFacts) -> Side<'a> {
    Side { summary, facts }
}

/// The synthetic run on three nodes, whose last node is drained in each round of clones.
#[test]
fn a_report_of_a_cluster_has_the_events_and_names_what_the_nodes_share() {
    let drained = r#"
[mode]
kind = "cluster"
nodes = 3
[mode.event]
kind = "drain-node"
running = 2
[target]
kind = "e2b"
[[gates]]
name = "nothing is lost"
metric = "event.lost"
limit = "0"
"#;
    let mut events = recorded::events(6);
    if let RunEvent::RunStarted(started) = &mut events[0] {
        started.scenario = harness::scenario::parse("cluster", drained).expect("a scenario");
    }
    let happened = |index: u32| {
        RunEvent::Happened(Happened {
            round: index * 2,
            row: Row::Measured,
            at_ns: 0,
            times: [
                (EventTime::Empty, vec![Some(3_000_000_000)]),
                (EventTime::Gap, vec![Some(400_000_000), Some(600_000_000)]),
            ]
            .into(),
            counts: [
                (EventCount::Lost, u64::from(index == 5)),
                (EventCount::MovedBytes, 50_000_000),
            ]
            .into(),
            failure: (index == 5).then(|| "event: gone".to_owned()),
        })
    };
    let last = events.len() - 1;
    events.splice(last..last, (0..6).map(happened));
    // As recorded.
    let events: Vec<RunEvent> = events
        .iter()
        .map(|event| serde_json::to_string(event).expect("an event is JSON"))
        .map(|line| serde_json::from_str(&line).expect("JSON is an event"))
        .collect();
    let (summary, host) = (fold(&events), host());
    let view = View::new(&summary, &host).expect("the events begin with a start");
    let cluster = Document::new(&view).cluster.expect("the target has nodes");
    let event = cluster.event.expect("the scenario has an event");
    assert_eq!((event.n, event.failed, event.counts["lost"]), (6, 1, 1));
    let gap = &event.times["gap"];
    assert_eq!(
        (gap.n, gap.p50_ms, gap.max_ms),
        (12, Some(400.0), Some(600.0))
    );
    assert!(!event.times.contains_key("unhealthy"));
    let text = terminal::render(&view);
    for part in [
        "drain-node: gap",
        "3, which share the 2 cores of this host",
        "1 in 6 events",
        "50.000 MB per event, mean",
        "drain-node: 1 of 6 events failed",
        "nothing is lost (event.lost)  MISSED",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    assert!(html::render(&view).contains("drain-node: empty"));
}

#[test]
fn the_head_of_a_page_says_when_and_on_what_and_each_figure_has_an_anchor() {
    let (summary, host) = (fold(&recorded::events(6)), host());
    let mut view = View::new(&summary, &host).unwrap();
    let hash = "c0ffee".repeat(10);
    view.record = Some(&hash);
    let page = html::render(&view);
    let head = page.split_once("</header>").unwrap().0;
    for part in [
        "2023-11-14T22:13:20Z",
        "platform ring3, 2 cores, Invented CPU, Linux 6.1.0",
        "0123456",
        &hash,
        "cube-bench check DIR",
    ] {
        assert!(head.contains(part), "{part}: {head}");
    }
    for anchor in [
        "id=\"gates.first-exec-p95-first-exec-p95\"",
        "id=\"memory-of-one-more-clone\"",
        "id=\"latency-ms-from-the-intended-start.host-process\"",
        "id=\"first-exec-p95\"",
    ] {
        assert!(page.contains(anchor), "{anchor}");
    }
}

#[test]
fn a_report_of_a_remote_target_describes_the_target_and_not_the_clients_vmm() {
    let mut events = recorded::events(6);
    let RunEvent::RunStarted(started) = &mut events[0] else {
        panic!("the first event is the start");
    };
    started.scenario.target.kind = TargetKind::E2b;
    started.scenario.target.api_url = Some("https://api.example.com".into());
    let mut host = host();
    host.sandboxes = Place::Elsewhere;
    host.endpoint = Some("https://api.example.com".into());
    host.software = Some("example/4.2".into());
    host.binaries.insert("cube-vmm".into(), "1d9651b0".into());
    let build = BuildFacts {
        commit: Some("16f8d76e".into()),
        dirty_tree: Some(false),
    };
    host.builds.insert("cube-vmm".into(), build);
    let summary = fold(&events);
    let view = View::new(&summary, &host).unwrap();
    let d = Document::new(&view);
    assert_eq!(d.host.platform, None);
    assert!(!d.host.binaries.contains_key("cube-vmm"));
    let target = d.target.unwrap();
    assert_eq!(target.software.as_deref(), Some("example/4.2"));
    for render in [terminal::render, markdown::render, html::render] {
        let text = render(&view);
        assert!(text.contains("e2b at https://api.example.com, template base"));
        assert!(text.contains("software example/4.2"));
        assert!(text.contains("client: 2 cores, Invented CPU"), "{text}");
        for wrong in ["cube-vmm", "16f8d76e", "platform ring3"] {
            assert!(!text.contains(wrong), "{wrong}: {text}");
        }
    }
}
