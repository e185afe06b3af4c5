//! The prover as a customer of a server that it did not start: no host, no internet and no neighbour of its own.
//!
//! What the guest says is then all there is, beside the refusals that the server tells of; a case that ends as it
//! should is the guest's word, and no pass. With an address of this machine that sandboxes may reach there are cases
//! with two ends: the prover listens there.

mod listener;

use std::{
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use netprobe::{Action, Finding, Outcome};
use serde_json::{Map, Value, json};

use super::{
    EVENT_PATIENCE, IsolationError, IsolationSpec, Proof, at,
    cases::{self, Case, Class, Expect, Group},
    chosen,
    judge::{self, Judged, Verdict},
    probe, report,
    sandbox::{Customer, Guest, NetworkEvent},
};
use listener::Listener;
use testbed::{artifacts, endpoint::Endpoint};

/// A server that runs already.
#[derive(Clone, Debug)]
pub struct TargetSpec {
    /// Its base URL.
    pub url: String,
    /// What it takes as `X-API-KEY`.
    pub key: String,
    /// An address of this machine that packets of its sandboxes reach.
    pub outside: Option<IpAddr>,
}

/// Tries what can be tried.
pub(super) fn run(spec: &IsolationSpec, target: &TargetSpec) -> Result<Proof, IsolationError> {
    let begun = Instant::now();
    let listeners = match target.outside {
        Some(address) => Listener::open_all(address).map_err(IsolationError::Outside)?,
        None => Vec::new(),
    };
    let groups = [cases::load()?, outside(&listeners)].concat();
    let groups = chosen(groups, spec)?;
    let program = artifacts::find_probe(spec.probe.as_deref())?;
    let customer = Customer {
        api: Endpoint::parse(&target.url)?,
        key: target.key.clone(),
        template: spec.template.clone(),
        program: std::fs::read(&program).map_err(at(&program))?,
    };
    customer.knock()?;
    let mut judged = Vec::new();
    for group in &groups {
        let count = group.cases.len();
        eprintln!("cube-bench: {count} cases under the policy {}", group.name);
        judged.extend(try_group(&customer, &listeners, group));
    }
    Ok(Proof {
        format: report::FORMAT,
        scope: spec.scope,
        target: Some(target.url.clone()),
        cases: judged,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Cases whose other end is here.
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
        Expect::Pass => "What the policy allows must work, or what is blocked proves nothing.",
        Expect::Blocked => "What the policy denies must not arrive.",
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

/// What there is to judge by.
#[derive(Clone, Copy, Debug)]
struct Evidence<'a> {
    finding: Option<&'a Finding>,
    /// Absent: the server tells of no refusals.
    events: Option<&'a [NetworkEvent]>,
    /// What came to the case's listener; absent: it has none.
    arrived: Option<u64>,
}

/// All attempts under one policy, in one sandbox and at the same time.
fn try_group(customer: &Customer, listeners: &[Listener], group: &Group) -> Vec<Judged> {
    let ear = |case: &Case| listeners.iter().find(|ear| is_at(case, ear.address()));
    let why_not = |case: &Case| why_not(case, ear(case));
    let cases = group.cases.iter();
    let tried: Vec<&Case> = cases.filter(|case| why_not(case).is_none()).collect();
    let outcome = if tried.is_empty() {
        Ok((Vec::new(), None))
    } else {
        attempt(customer, group, &tried)
    };
    let judge_one = |case: &Case| match (&outcome, why_not(case)) {
        (_, Some(why)) => not_tried(case, why),
        (Err(error), None) => not_tried(case, error),
        (Ok((findings, events)), None) => {
            let evidence = Evidence {
                finding: findings.iter().find(|finding| finding.name == case.word()),
                events: events.as_deref(),
                arrived: ear(case).map(Listener::arrived),
            };
            judge_from_afar(case, evidence)
        }
    };
    group.cases.iter().map(judge_one).collect()
}

type Attempt = (Vec<Finding>, Option<Vec<NetworkEvent>>);

fn attempt(customer: &Customer, group: &Group, tried: &[&Case]) -> Result<Attempt, String> {
    let failed = |error| model::chain(&error);
    let guest: Guest = customer.create(&group.create).map_err(failed)?;
    let probes: Vec<_> = tried.iter().filter_map(|case| probe(case)).collect();
    let findings = guest.probe(&probes).map_err(failed)?;
    let enough = |events: &[NetworkEvent]| tried.iter().all(|case| judge::is_told(case, events));
    // Other servers have no such route.
    let events = guest.await_events(Instant::now() + EVENT_PATIENCE, enough);
    Ok((findings, events.ok()))
}

fn is_at(case: &Case, address: SocketAddr) -> bool {
    matches!(&case.action, Some(Action::Tcp(to) | Action::Udp(to)) if *to == address)
}

/// Why a case means nothing without a host and an internet of the prover's own, or an ear outside.
fn why_not(case: &Case, ear: Option<&Listener>) -> Option<&'static str> {
    let own_host = !case.reasons.is_empty() && case.reasons.iter().all(|reason| reason == "host");
    match (&case.action, case.expect) {
        (None, _) => Some("it needs a host and an internet of the prover's own"),
        _ if own_host => Some("it is about an address of a host of the prover's own"),
        (Some(Action::Arp(_) | Action::Solicit(_)), _) => None,
        (Some(Action::Name(_)), _) => Some("it needs a name server of the prover's own"),
        (Some(Action::Dns(query)), expect) => {
            let is_asked = query.server.is_none() && case.asked != Some(false);
            (is_asked || expect == Expect::Pass)
                .then_some("it needs a name server of the prover's own")
        }
        (Some(_), Expect::Pass) if ear.is_none() => Some("nobody is known to answer there"),
        (Some(_), Expect::Pass) => None,
        (Some(_), Expect::Blocked) => None,
    }
}

fn not_tried(case: &Case, why: &str) -> Judged {
    Judged {
        verdict: Verdict::NotTried,
        wrong: vec![why.to_owned()],
        ..untold(case)
    }
}

fn untold(case: &Case) -> Judged {
    let tried = case.action.as_ref().map(|action| format!("{action:?}"));
    Judged {
        case: case.name.clone(),
        class: case.class,
        why: case.why.clone(),
        verdict: Verdict::NotTried,
        tried: tried.unwrap_or_else(|| format!("script {:?}", case.script)),
        guest: String::new(),
        arrived: [0; 3],
        wrong: Vec::new(),
    }
}

/// Judges one attempt. Pure.
fn judge_from_afar(case: &Case, evidence: Evidence<'_>) -> Judged {
    let finding = match evidence.finding {
        None => return not_tried(case, "the probe said nothing"),
        Some(finding) if finding.outcome == Outcome::Failed => {
            return not_tried(case, &finding.said);
        }
        Some(finding) => finding,
    };
    let (verdict, wrong) = match case.expect {
        Expect::Pass => passed(finding, evidence),
        Expect::Blocked => blocked(case, finding, evidence),
    };
    Judged {
        verdict,
        guest: format!("{}: {}", finding.outcome.name(), finding.said),
        arrived: [evidence.arrived.unwrap_or(0), 0, 0],
        wrong: wrong.into_iter().map(str::to_owned).collect(),
        ..untold(case)
    }
}

fn passed(finding: &Finding, evidence: Evidence<'_>) -> (Verdict, Option<&'static str>) {
    match evidence.arrived {
        _ if finding.outcome != Outcome::Ok => (
            Verdict::Unproven,
            Some("this must work, and does not: nothing that is blocked proves anything"),
        ),
        Some(0) => (Verdict::Unproven, Some("it never arrived outside")),
        Some(_) => (Verdict::Pass, None),
        None => (Verdict::GuestsWord, Some("nobody looked at the other end")),
    }
}

fn blocked(
    case: &Case,
    finding: &Finding,
    evidence: Evidence<'_>,
) -> (Verdict, Option<&'static str>) {
    let told = evidence.events.map(|events| judge::is_told(case, events));
    let receiver = case.receiver().map(|(to, _)| to);
    match (evidence.arrived, told) {
        _ if finding.outcome == Outcome::Ok => (Verdict::Breach, Some("the guest got an answer")),
        (Some(1..), _) => (Verdict::Breach, Some("it arrived outside")),
        _ if !case.outcomes().contains(&finding.outcome) => (
            Verdict::Unproven,
            Some("the guest was stopped in another way than it should be"),
        ),
        (_, Some(false)) => (
            Verdict::Unproven,
            Some("the server tells of no such refusal"),
        ),
        (Some(0), _) => (Verdict::Pass, None),
        (None, None) if receiver.is_some_and(is_nobodys) => (
            Verdict::NotTried,
            Some("nobody is there who could answer, and the server tells of no refusals"),
        ),
        (None, _) => (Verdict::GuestsWord, Some("nobody looked at the other end")),
    }
}

/// Whether an address is one of documentation (RFC 5737, RFC 3849), where nobody answers.
fn is_nobodys(address: IpAddr) -> bool {
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

    fn told(reason: &str) -> Vec<NetworkEvent> {
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
        judge_from_afar(
            &case("a-case-of-this", Class::Policy, expect, action),
            evidence,
        )
        .verdict
    }

    #[test]
    fn nothing_that_one_end_says_is_a_pass() {
        use Expect::{Blocked, Pass};
        use Outcome::{Failed, Ok, Timeout};
        let (policy, spoofed) = (told("policy"), told("spoofed"));
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
        // Where nobody is, silence says nothing.
        let silent = verdict("198.51.100.1:80", Blocked, Timeout, None, None);
        assert_eq!(silent, Verdict::NotTried);
    }

    #[test]
    fn much_can_be_tried_from_afar_and_nothing_that_needs_a_world() {
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
