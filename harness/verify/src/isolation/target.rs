//! The suite against a server that it did not start, where it controls neither the host, nor the internet, nor a
//! neighbour.
//!
//! The only observations are the guest's own and the refusals that the server reports, so a case that ends as
//! expected is "the guest's word", not a pass. If sandboxes can reach an address of this host, the suite listens
//! there and can observe the other end of some cases.

mod listener;

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use netprobe::{Action, Finding, Outcome};
use serde_json::{Map, Value, json};

use super::{
    IsolationSpec, TargetSpec,
    cases::{self, Case, Class, Expect, Group},
    evaluate::{is_reported, not_tried, seen_by_guest, with_arrived},
    sandbox::{self, Customer, NetworkEvent},
    select::{probe, select},
    timing::EVENT_TIMEOUT,
};
use crate::{
    report::{self, Report, Verdict},
    setup::{VerifyError, at},
};
use listener::Listener;
use testbed::{api::Api, artifacts, endpoint::Endpoint};

/// Problem of a case whose receiver the suite cannot observe.
const UNOBSERVED: &str = "only the guest's end was observed";

/// Runs the cases that need only the server.
pub(super) fn run(spec: &IsolationSpec, target: &TargetSpec) -> Result<Report, VerifyError> {
    let begun = Instant::now();
    let listeners = match target.outside {
        Some(address) => Listener::open_all(address).map_err(VerifyError::Outside)?,
        None => Vec::new(),
    };
    let groups = [cases::load()?, outside(&listeners)].concat();
    let groups = select(groups, spec)?;
    let program = artifacts::find_probe(spec.probe.as_deref())?;
    let program = std::fs::read(&program).map_err(at(&program))?;
    let api = Api {
        control: Endpoint::parse(&target.url)?,
        sandbox_url: None,
        key: target.key.clone(),
        timeout: sandbox::TIMEOUT,
    };
    let customer = Customer::new(api, &spec.setup.template, program);
    customer.account.check()?;
    let mut reports = Vec::new();
    for group in &groups {
        group.announce();
        reports.extend(try_group(&customer, &listeners, group));
    }
    let target = Some(target.url.clone());
    Ok(Report::new(spec.scope.suite(), target, reports, begun, ()))
}

/// Cases whose receiver is one of the listeners.
fn outside(listeners: &[Listener]) -> Vec<Group> {
    let [tcp, udp, shut_tcp, shut_udp] = listeners else {
        return Vec::new();
    };
    let allowed = json!([tcp.address().ip().to_string()]);
    let denied = json!(["0.0.0.0/0", "::/0"]);
    let passes = |name: &str, action| case(name, Class::Control, Expect::Pass, action);
    let blocked = |name: &str, action| case(name, Class::Policy, Expect::Blocked, action);
    vec![
        Group {
            name: "outside-allowed".to_owned(),
            create: network(json!({ "allowOut": allowed, "denyOut": denied })),
            cases: vec![
                passes("outside-tcp-passes", Action::Tcp(tcp.address())),
                passes("outside-udp-passes", Action::Udp(udp.address())),
            ],
        },
        Group {
            name: "outside-denied".to_owned(),
            create: network(json!({ "denyOut": denied })),
            cases: vec![
                blocked("outside-denied-tcp", Action::Tcp(shut_tcp.address())),
                blocked("outside-denied-udp", Action::Udp(shut_udp.address())),
            ],
        },
    ]
}

fn network(options: Value) -> Map<String, Value> {
    Map::from_iter([("network".to_owned(), options)])
}

fn case(name: &str, class: Class, expect: Expect, action: Action) -> Case {
    let reasons = match expect {
        Expect::Pass => Vec::new(),
        Expect::Blocked => vec!["policy".to_owned()],
    };
    let why = match expect {
        Expect::Pass => {
            "Traffic that the policy allows must get through; otherwise blocked traffic proves nothing."
        }
        Expect::Blocked => "Traffic that the policy denies must not arrive.",
    };
    Case {
        name: name.to_owned(),
        class,
        why: why.to_owned(),
        action: Some(action),
        first: Vec::new(),
        script: None,
        expect,
        guest: Vec::new(),
        reasons,
        asked: None,
    }
}

/// Observations of one case.
#[derive(Clone, Copy, Debug)]
struct Evidence<'a> {
    /// The probe's finding; `None` if it reported none.
    finding: Option<&'a Finding>,
    /// Refusals in the sandbox; `None` if the server does not report refusals.
    events: Option<&'a [NetworkEvent]>,
    /// Connections or datagrams at the case's listener; `None` if it has no listener.
    arrived: Option<u64>,
}

/// Tries the cases of a group, all in one sandbox and at the same time.
fn try_group(customer: &Customer, listeners: &[Listener], group: &Group) -> Vec<report::Case> {
    let listener = |case: &Case| listeners.iter().find(|l| is_at(case, l.address()));
    let why_not = |case: &Case| why_not(case, listener(case));
    let cases = group.cases.iter();
    let tried: Vec<&Case> = cases.filter(|case| why_not(case).is_none()).collect();
    let outcome = if tried.is_empty() {
        Ok((Vec::new(), None))
    } else {
        attempt(customer, group, &tried)
    };
    let report = |case: &Case| match (&outcome, why_not(case)) {
        (_, Some(why)) => not_tried(case, [why.to_owned()]),
        (Err(error), None) => not_tried(case, [error.clone()]),
        (Ok((findings, events)), None) => {
            let evidence = Evidence {
                finding: findings.iter().find(|f| f.name == case.payload()),
                events: events.as_deref(),
                arrived: listener(case).map(Listener::arrived),
            };
            evaluate(case, evidence)
        }
    };
    group.cases.iter().map(report).collect()
}

type Attempt = (Vec<Finding>, Option<Vec<NetworkEvent>>);

fn attempt(customer: &Customer, group: &Group, tried: &[&Case]) -> Result<Attempt, String> {
    let failed = |error| model::chain(&error);
    let guest = customer.create(&group.create).map_err(failed)?;
    let probes: Vec<_> = tried.iter().filter_map(|case| probe(case)).collect();
    let findings = guest.probe(&probes).map_err(failed)?;
    let enough = |events: &[NetworkEvent]| tried.iter().all(|case| is_reported(case, events));
    // The route is not part of E2B's API; other servers return an error.
    let events = guest.await_events(Instant::now() + EVENT_TIMEOUT, enough);
    Ok((findings, events.ok()))
}

fn is_at(case: &Case, address: SocketAddr) -> bool {
    matches!(&case.action, Some(Action::Tcp(to) | Action::Udp(to)) if *to == address)
}

/// Why a case cannot be tried without a host, an internet or a listener under the suite's control; `None` if it
/// can.
fn why_not(case: &Case, listener: Option<&Listener>) -> Option<&'static str> {
    let needs_host = !case.reasons.is_empty() && case.reasons.iter().all(|reason| reason == "host");
    match (&case.action, case.expect) {
        (None, _) => Some("the case needs a host and an internet that the suite controls"),
        _ if needs_host => Some("the case needs a host that the suite controls"),
        (Some(Action::Arp(_) | Action::Solicit(_)), _) => None,
        (Some(Action::Name(_)), _) => Some("the case needs a name server that the suite controls"),
        (Some(Action::Dns(query)), expect) => {
            let is_asked = query.server.is_none() && case.asked != Some(false);
            (is_asked || expect == Expect::Pass)
                .then_some("the case needs a name server that the suite controls")
        }
        (Some(_), Expect::Pass) if listener.is_none() => {
            Some("no server is known to answer at the receiver's address")
        }
        (Some(_), Expect::Pass) => None,
        (Some(_), Expect::Blocked) => None,
    }
}

/// Derives the result of a case from its observations.
fn evaluate(case: &Case, evidence: Evidence<'_>) -> report::Case {
    let finding = match evidence.finding {
        None => {
            return not_tried(case, ["the probe reported no finding".to_owned()]);
        }
        Some(finding) if finding.outcome == Outcome::Failed => {
            return not_tried(case, [finding.said.clone()]);
        }
        Some(finding) => finding,
    };
    let (verdict, problem) = match case.expect {
        Expect::Pass => passed(finding, evidence),
        Expect::Blocked => blocked(case, finding, evidence),
    };
    let arrived = [evidence.arrived.unwrap_or(0), 0, 0];
    with_arrived(not_tried(case, []), arrived)
        .with("guest", seen_by_guest(finding))
        .judged(verdict, problem)
}

fn passed(finding: &Finding, evidence: Evidence<'_>) -> (Verdict, Option<&'static str>) {
    match evidence.arrived {
        _ if finding.outcome != Outcome::Ok => (
            Verdict::Unproven,
            Some("the control case failed, so blocked traffic proves nothing"),
        ),
        Some(0) => (Verdict::Unproven, Some("no packet arrived at the listener")),
        Some(_) => (Verdict::Pass, None),
        None => (Verdict::GuestsWord, Some(UNOBSERVED)),
    }
}

fn blocked(
    case: &Case,
    finding: &Finding,
    evidence: Evidence<'_>,
) -> (Verdict, Option<&'static str>) {
    let reported = evidence.events.map(|events| is_reported(case, events));
    let receiver = case.receiver().map(|(to, _)| to);
    match (evidence.arrived, reported) {
        _ if finding.outcome == Outcome::Ok => (Verdict::Breach, Some("the guest got an answer")),
        (Some(1..), _) => (Verdict::Breach, Some("packets arrived at the listener")),
        _ if !case.outcomes().contains(&finding.outcome) => (
            Verdict::Unproven,
            Some("the guest saw another kind of refusal than expected"),
        ),
        (_, Some(false)) => (
            Verdict::Unproven,
            Some("the server does not report the refusal"),
        ),
        (Some(0), _) => (Verdict::Pass, None),
        (None, None) if receiver.is_some_and(is_documentation) => (
            Verdict::NotTried,
            Some("no server exists at the receiver's address, and this API reports no refusals"),
        ),
        (None, _) => (Verdict::GuestsWord, Some(UNOBSERVED)),
    }
}

/// Whether an address is reserved for documentation (RFC 5737, RFC 3849), so that no server answers there.
fn is_documentation(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_documentation(),
        IpAddr::V6(v6) => v6.segments()[..2] == [0x2001, 0xdb8],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(outcome: Outcome) -> Finding {
        Finding {
            name: "a".into(),
            outcome,
            said: String::new(),
            count: 0,
            figures: Vec::new(),
        }
    }

    fn event(reason: &str) -> Vec<NetworkEvent> {
        vec![NetworkEvent {
            reason: reason.into(),
            destination: "10.0.0.1:80".parse().unwrap(),
            name: None,
            count: 1,
        }]
    }

    fn verdict(
        to: &str,
        expect: Expect,
        outcome: Outcome,
        arrived: Option<u64>,
        events: Option<&[NetworkEvent]>,
    ) -> Verdict {
        let action = Action::Tcp(to.parse().unwrap());
        let finding = finding(outcome);
        let evidence = Evidence {
            finding: Some(&finding),
            events,
            arrived,
        };
        evaluate(
            &case("a-case-of-this", Class::Policy, expect, action),
            evidence,
        )
        .verdict
    }

    #[test]
    fn an_observation_at_one_end_alone_is_never_a_pass() {
        use Expect::{Blocked, Pass};
        use Outcome::{Failed, Ok, Timeout};
        let (policy, spoofed) = (event("policy"), event("spoofed"));
        let (policy, spoofed) = (Some(&policy[..]), Some(&spoofed[..]));
        let to = "10.0.0.1:80";
        for (expect, outcome, arrived, events, end) in [
            (Pass, Ok, None, policy, Verdict::GuestsWord),
            (Pass, Ok, Some(1), policy, Verdict::Pass),
            (Pass, Ok, Some(0), policy, Verdict::Unproven),
            (Pass, Timeout, None, policy, Verdict::Unproven),
            (Pass, Failed, None, policy, Verdict::NotTried),
            (Blocked, Timeout, None, policy, Verdict::GuestsWord),
            (Blocked, Timeout, None, None, Verdict::GuestsWord),
            (Blocked, Timeout, None, spoofed, Verdict::Unproven),
            (Blocked, Timeout, Some(0), spoofed, Verdict::Unproven),
            (Blocked, Timeout, Some(0), policy, Verdict::Pass),
            (Blocked, Timeout, Some(0), None, Verdict::Pass),
            (Blocked, Timeout, Some(1), policy, Verdict::Breach),
            (Blocked, Ok, None, policy, Verdict::Breach),
            (Blocked, Failed, None, policy, Verdict::NotTried),
        ] {
            let found = verdict(to, expect, outcome, arrived, events);
            assert_eq!(found, end, "{expect:?} {outcome:?} {arrived:?} {events:?}");
        }
        // An address without a server never responds, so a timeout proves nothing.
        let silent = verdict("198.51.100.1:80", Blocked, Timeout, None, None);
        assert_eq!(silent, Verdict::NotTried);
    }

    #[test]
    fn many_cases_run_against_a_foreign_server_but_none_that_needs_the_namespaces() {
        let groups = cases::load().unwrap();
        let cases: Vec<&Case> = groups.iter().flat_map(|group| &group.cases).collect();
        let tried = cases.iter().filter(|case| why_not(case, None).is_none());
        assert!(tried.count() >= 60);
        for case in &cases {
            let needs = case.script.is_some() || matches!(case.action, Some(Action::Name(_)));
            assert!(!needs || why_not(case, None).is_some(), "{}", case.name);
        }
    }
}
