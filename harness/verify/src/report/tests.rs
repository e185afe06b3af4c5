use super::*;

use Verdict::{
    Absent, Breach, Fail, GuestsWord, Known, NotRun, NotTried, Pass, TimedOut, Unproven, Warned,
};

/// Every verdict, with its outcome in JUnit and the exit code of a run that has no other case.
const VERDICTS: [(Verdict, Outcome, u8); 11] = [
    (Pass, Outcome::Passed, 0),
    (Absent, Outcome::Skipped, 0),
    (Known, Outcome::Skipped, 0),
    (Warned, Outcome::Skipped, 0),
    (Breach, Outcome::Failed, 4),
    (Fail, Outcome::Failed, 3),
    (TimedOut, Outcome::Error("timed_out"), 3),
    (NotRun, Outcome::Error("not_run"), 3),
    (Unproven, Outcome::Error("unproven"), 5),
    (GuestsWord, Outcome::Error("guests_word"), 5),
    (NotTried, Outcome::Error("not_tried"), 5),
];

fn report(suite: Suite, cases: Vec<Case>) -> Report {
    Report {
        format: FORMAT,
        suite,
        target: None,
        cases,
        seconds: 61.4,
        figures: (),
    }
}

fn one_of_each() -> Report {
    let case = |(verdict, ..): (Verdict, Outcome, u8)| {
        let case = Case::new(
            "host",
            &format!("case-{}", verdict.name()),
            "a host has services",
        );
        let case = case.with("guest", "timeout: no <device>");
        match verdict {
            Pass => case.judged(verdict, [""; 0]),
            _ => case.judged(verdict, ["one \"problem\"", "another"]),
        }
    };
    report(Suite::Isolation, VERDICTS.map(case).to_vec())
}

#[test]
fn each_verdict_has_its_outcome_and_its_exit_code() {
    for (verdict, outcome, code) in VERDICTS {
        assert_eq!(verdict.outcome(), outcome, "{verdict:?}");
        assert_eq!(verdict.end().code(), code, "{verdict:?}");
        let json = serde_json::to_string(&verdict).unwrap();
        assert_eq!(json, format!("{:?}", verdict.name()));
    }
}

#[test]
fn a_breach_outweighs_a_failure_and_both_outweigh_what_proves_nothing() {
    let end = |verdicts: &[Verdict]| {
        let case = |verdict: &Verdict| Case::new("a", "b", "").judged(*verdict, [""; 0]);
        report(Suite::CloneHazards, verdicts.iter().map(case).collect()).end()
    };
    assert_eq!(end(&[]), End::Inconclusive, "nothing was verified");
    assert_eq!(end(&[Pass, Absent, Known, Warned]), End::Pass);
    for unproven in [Unproven, GuestsWord, NotTried] {
        assert_eq!(end(&[Pass, unproven]), End::Inconclusive);
        assert_eq!(end(&[unproven, Fail, Pass]), End::GateFailed);
        assert_eq!(end(&[unproven, Fail, Breach]), End::Breach);
    }
}

#[test]
fn only_required_cases_count() {
    let case = Case::new("cli-1", "logs", "").judged(Fail, ["said no"]);
    let mut report = report(Suite::E2b, vec![case]);
    assert_eq!(report.end(), End::GateFailed);
    report.cases[0].required = false;
    assert_eq!(report.end(), End::Pass);
}

#[test]
fn reports_explain_each_case_that_did_not_pass_and_name_the_command_that_repeats_it() {
    let report = one_of_each();
    insta::assert_snapshot!("terminal", report.terminal());
    insta::assert_snapshot!("junit", report.junit());
    insta::assert_snapshot!("markdown", report.markdown());
    let read: Report = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(read, report);
}

#[test]
fn cases_with_the_same_name_share_a_row() {
    let case = |class: &str, name: &str, verdict| {
        Case::new(class, name, "needed").judged(verdict, ["said <no> | \"really\""])
    };
    let mut report = report(
        Suite::E2b,
        vec![
            case("python-2", "create", Pass),
            case("cli-1", "create", Absent),
            case("cli-1", "logs", Fail),
            case("cli-1", "logs", Pass),
        ],
    );
    report.target = Some("http://127.0.0.1:1".to_owned());
    report.cases[2].required = false;
    insta::assert_snapshot!("matrix", report.terminal());
    insta::assert_snapshot!("matrix-markdown", report.markdown());
}
