//! Snapshots of all reports of one synthetic run on one synthetic host.

#[path = "support/exchanged.rs"]
mod exchanged;
#[path = "support/recorded.rs"]
mod recorded;

use std::path::Path;

use harness::{
    compare::{self, CompareError, Side},
    gate::GateOutcome,
    host::facts::{self, HostFacts},
    report::{View, document::Document, html, junit, markdown, terminal},
    stats::fold::{Summary, fold},
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
fn a_gate_on_the_ratio_of_a_turn_passes_fails_or_is_inconclusive() {
    let (summary, mut host) = (fold(&exchanged::events(12)), host());
    let verdicts = |host: &HostFacts| {
        let view = View::new(&summary, host).expect("the events begin with a start");
        view.gates
            .iter()
            .map(|gate| gate.verdict)
            .collect::<Vec<_>>()
    };
    let (pass, fail, open) = (
        GateOutcome::Pass,
        GateOutcome::Fail,
        GateOutcome::Inconclusive,
    );
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
