//! Derives the result of a case from the observations of the guest, the packet capture, the neighbour and the server.
//! The functions are pure.

use netprobe::{Action, Finding, Outcome, dns};

use super::{
    cases::{Case, Expect},
    observed::Observed,
    sandbox::NetworkEvent,
    world::{Place, Seen},
};
use crate::report::{self, Verdict};

/// Offset of the question in a captured datagram, behind the UDP and DNS headers.
const QUESTION: usize = 8 + 12;

/// The report of a case that was not tried. The reports of other cases start from it.
pub(super) fn not_tried(case: &Case, problems: impl IntoIterator<Item = String>) -> report::Case {
    let action = case.action.as_ref().map(|action| format!("{action:?}"));
    let tried = action.unwrap_or_else(|| format!("script {:?}", case.script));
    report::Case::new(case.class.name(), &case.name, &case.why)
        .with("tried", tried)
        .judged(Verdict::NotTried, problems)
}

/// The guest's observation.
pub(super) fn seen_by_guest(finding: &Finding) -> String {
    format!("{}: {}", finding.outcome.name(), finding.said)
}

/// Adds the number of packets that arrived outside, at the host and at the neighbour.
pub(super) fn with_arrived(case: report::Case, arrived: [u64; 3]) -> report::Case {
    let [outside, host, neighbour] = arrived;
    case.with(
        "arrived",
        format!("{outside} outside, {host} at the host, {neighbour} at the neighbour"),
    )
}

/// Observations of one case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence<'a> {
    /// The probe's finding; `None` if it reported none.
    pub(super) finding: Option<&'a Finding>,
    /// Packets captured outside and at the host while the case ran.
    pub(super) seen: &'a [Seen],
    /// The server's events about this sandbox.
    pub(super) events: &'a [NetworkEvent],
    /// Payloads that the neighbour received; `None` if it could not listen.
    pub(super) heard: Option<&'a [String]>,
}

/// Evaluates a case that is not a script.
pub(super) fn evaluate(case: &Case, evidence: Evidence<'_>) -> report::Case {
    let finding = match evidence.finding {
        None => return not_tried(case, ["the probe reported no finding".to_owned()]),
        Some(finding) if finding.outcome == Outcome::Failed => {
            return not_tried(case, [finding.said.clone()]);
        }
        Some(finding) => finding,
    };
    let arrived = [
        count(case, evidence.seen, Place::Outside),
        count(case, evidence.seen, Place::Host),
        heard(case, evidence),
    ];
    let mut found = Observed {
        guest: seen_by_guest(finding),
        ..Observed::default()
    };
    match case.expect {
        Expect::Blocked => blocked(case, finding, evidence, arrived, &mut found),
        Expect::Pass => passed(case, finding, evidence, arrived, &mut found),
    }
    found.judge(with_arrived(not_tried(case, []), arrived))
}

fn blocked(
    case: &Case,
    finding: &Finding,
    evidence: Evidence<'_>,
    arrived: [u64; 3],
    found: &mut Observed,
) {
    found.breach_if(finding.outcome == Outcome::Ok, "the guest got an answer");
    for (count, place) in arrived
        .iter()
        .zip(["outside", "at the host", "at the neighbour"])
    {
        found.breach_if(*count > 0, format!("{count} packets arrived {place}"));
    }
    found.breach_if(
        case.asked == Some(false) && was_asked(case, evidence.seen),
        "the name was looked up outside",
    );
    found.doubt_unless(
        case.outcomes().contains(&finding.outcome),
        "the guest saw another kind of refusal than expected",
    );
    found.doubt_unless(
        is_reported(case, evidence.events),
        format!("no event with the reason {}", case.reasons.join(" or ")),
    );
    found.doubt_unless(evidence.heard.is_some(), "the neighbour could not listen");
}

fn passed(
    case: &Case,
    finding: &Finding,
    evidence: Evidence<'_>,
    arrived: [u64; 3],
    found: &mut Observed,
) {
    found.breach_if(
        arrived[1] > 0 || arrived[2] > 0,
        "packets arrived at a place that they were not sent to",
    );
    found.doubt_unless(
        case.outcomes().contains(&finding.outcome),
        "the control case failed, so blocked traffic proves nothing",
    );
    found.doubt_unless(
        !is_to_outside(case) || arrived[0] > 0,
        "no packet arrived outside",
    );
    found.doubt_unless(
        case.asked != Some(true) || was_asked(case, evidence.seen),
        "the name was never looked up outside",
    );
}

/// Whether the packets of the case go to a receiver outside. The packets of other cases go to the gateway, for example.
fn is_to_outside(case: &Case) -> bool {
    match &case.action {
        Some(Action::Tcp(_) | Action::Udp(_) | Action::Name(_) | Action::Frame(_)) => true,
        Some(_) | None => false,
    }
}

fn count(case: &Case, seen: &[Seen], place: Place) -> u64 {
    // If a flow has expired, the host itself receives the reply. The reply repeats the payload of the request, but
    // the request did not arrive, so it is not counted.
    let is_answer = |seen: &Seen| case.receiver().is_some_and(|(to, _)| seen.from == Some(to));
    let counts = |seen: &&Seen| seen.place == place && is_of(seen, case) && !is_answer(seen);
    let count = seen.iter().filter(counts).count();
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Whether a captured packet belongs to the case: by its payload, or by a receiver that no other case has.
fn is_of(seen: &Seen, case: &Case) -> bool {
    let by_receiver = match (&case.action, case.receiver()) {
        (Some(Action::Tcp(_)), Some((to, port))) => seen.to == Some(to) && seen.port == port,
        // Each case of this kind has its own port.
        (Some(Action::Name(to)), _) => case.expect == Expect::Blocked && seen.port == Some(to.port),
        _ => false,
    };
    by_receiver || seen.has(case.payload().as_bytes())
}

fn was_asked(case: &Case, seen: &[Seen]) -> bool {
    let Some(name) = case.asked_name() else {
        return false;
    };
    let wire = dns::wire_name(&name.to_ascii_lowercase());
    let asks = |seen: &&Seen| seen.place == Place::Outside && seen.port == Some(53);
    let mut questions = seen
        .iter()
        .filter(asks)
        .filter_map(|seen| seen.payload.get(QUESTION..));
    questions.any(|question| question.to_ascii_lowercase().starts_with(&wire))
}

fn heard(case: &Case, evidence: Evidence<'_>) -> u64 {
    let payloads = evidence.heard.unwrap_or_default();
    u64::from(payloads.contains(&case.payload()))
}

/// Whether the events include one that the case expects. True if the case expects none.
pub(super) fn is_reported(case: &Case, events: &[NetworkEvent]) -> bool {
    case.reasons.is_empty() || events.iter().any(|event| is_about(event, case))
}

fn is_about(event: &NetworkEvent, case: &Case) -> bool {
    if !case.reasons.contains(&event.reason) {
        return false;
    }
    match (case.asked_name(), case.receiver()) {
        (Some(name), None) => event.name.as_deref() == Some(name) || event.name.is_none(),
        // The event about an unreadable frame has no receiver.
        (_, Some((to, _))) => {
            event.destination.ip() == to || event.destination.ip().is_unspecified()
        }
        (None, None) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(expect: &str) -> Case {
        let text = format!(
            "name = \"a-case-of-this\"\nclass = \"policy\"\nwhy = \"a test\"\nexpect = \"{expect}\"\n\
             do = {{ tcp = \"10.0.0.1:80\" }}\nreasons = [\"forbidden\"]"
        );
        toml::from_str(&text).unwrap()
    }

    fn finding(outcome: Outcome) -> Finding {
        Finding {
            name: "a-case-of-this".into(),
            outcome,
            said: String::new(),
            count: 0,
            figures: Vec::new(),
        }
    }

    fn seen(place: Place) -> Seen {
        Seen {
            place,
            to: "10.0.0.1".parse().ok(),
            port: Some(80),
            from: None,
            from_port: None,
            protocol: 6,
            payload: Vec::new(),
        }
    }

    fn event(reason: &str) -> NetworkEvent {
        NetworkEvent {
            reason: reason.into(),
            destination: "10.0.0.1:80".parse().unwrap(),
            name: None,
            count: 1,
        }
    }

    fn verdict(case: &Case, outcome: Outcome, seen: &[Seen], events: &[NetworkEvent]) -> Verdict {
        let finding = finding(outcome);
        let evidence = Evidence {
            finding: Some(&finding),
            seen,
            events,
            heard: Some(&[]),
        };
        evaluate(case, evidence).verdict
    }

    #[test]
    fn a_blocked_case_passes_with_silence_at_both_ends_and_an_event() {
        let case = case("blocked");
        let events = [event("forbidden")];
        assert_eq!(
            verdict(&case, Outcome::Timeout, &[], &events),
            Verdict::Pass
        );
        assert_eq!(
            verdict(&case, Outcome::Timeout, &[], &[event("policy")]),
            Verdict::Unproven
        );
        assert_eq!(verdict(&case, Outcome::Ok, &[], &events), Verdict::Breach);
        for place in [Place::Outside, Place::Host] {
            assert_eq!(
                verdict(&case, Outcome::Timeout, &[seen(place)], &events),
                Verdict::Breach
            );
        }
        assert_eq!(
            verdict(&case, Outcome::Failed, &[], &events),
            Verdict::NotTried
        );
    }

    #[test]
    fn a_control_case_passes_only_if_its_packets_arrive() {
        let case = case("pass");
        let there = [seen(Place::Outside)];
        assert_eq!(verdict(&case, Outcome::Ok, &there, &[]), Verdict::Pass);
        assert_eq!(verdict(&case, Outcome::Ok, &[], &[]), Verdict::Unproven);
        assert_eq!(
            verdict(&case, Outcome::Timeout, &there, &[]),
            Verdict::Unproven
        );
        assert_eq!(
            verdict(&case, Outcome::Ok, &[seen(Place::Host)], &[]),
            Verdict::Breach
        );
    }

    #[test]
    fn a_lookup_of_a_longer_or_shorter_name_does_not_count() {
        let mut case = case("blocked");
        let action = |name: &str| {
            let text = format!("dns = {{ name = \"{name}\" }}");
            toml::from_str::<Action>(&text).ok()
        };
        let mut question = vec![0; 8];
        question.extend(dns::question(7, "ok.A.test", netprobe::RecordKind::A));
        let asked = Seen {
            port: Some(53),
            payload: question,
            ..seen(Place::Outside)
        };
        for (name, is_asked) in [("ok.a.test", true), ("a.test", false), ("ok.a", false)] {
            case.action = action(name);
            assert_eq!(
                was_asked(&case, std::slice::from_ref(&asked)),
                is_asked,
                "{name}"
            );
        }
    }

    #[test]
    fn a_payload_at_the_neighbour_is_a_breach_and_a_neighbour_that_cannot_listen_proves_nothing() {
        let case = case("blocked");
        let silent = finding(Outcome::Timeout);
        let payloads = [case.payload()];
        let mut evidence = Evidence {
            finding: Some(&silent),
            seen: &[],
            events: &[event("forbidden")],
            heard: Some(&payloads),
        };
        assert_eq!(evaluate(&case, evidence).verdict, Verdict::Breach);
        evidence.heard = None;
        assert_eq!(evaluate(&case, evidence).verdict, Verdict::Unproven);
    }
}
