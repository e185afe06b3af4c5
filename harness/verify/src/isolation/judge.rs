//! What became of a case, from what both ends and the server say. Pure.

use netprobe::{Action, Finding, Outcome, dns};
use serde::{Deserialize, Serialize};

use super::{
    cases::{Case, Class, Expect},
    sandbox::NetworkEvent,
    world::{Place, Seen},
};

/// Where the question begins in a datagram: after the headers of UDP and of the DNS.
const QUESTION: usize = 8 + 12;

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should.
    Pass,
    /// Something got through that must not.
    Breach,
    /// Tried, but one of the ends does not bear it out: a control that failed, an event that is missing.
    Unproven,
    /// The guest says that it ended as it should, and nobody looked at the other end.
    GuestsWord,
    /// It could not be tried.
    NotTried,
}

impl Verdict {
    /// The name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Breach => "breach",
            Self::Unproven => "unproven",
            Self::GuestsWord => "guests_word",
            Self::NotTried => "not_tried",
        }
    }
}

/// A case and its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// Name of the case.
    pub case: String,
    /// See [`Class`].
    pub class: Class,
    /// Why it is there.
    pub why: String,
    /// See [`Verdict`].
    pub verdict: Verdict,
    /// What was tried.
    pub tried: String,
    /// What the guest saw.
    pub guest: String,
    /// Packets that arrived outside, at the host and at the neighbour.
    pub arrived: [u64; 3],
    /// What is wrong; empty for a pass.
    pub wrong: Vec<String>,
}

/// What there is to judge by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evidence<'a> {
    /// From the guest; absent: it said nothing.
    pub(super) finding: Option<&'a Finding>,
    /// From outside and from the host, of the time of the case.
    pub(super) seen: &'a [Seen],
    /// From the server, of this sandbox.
    pub(super) events: &'a [NetworkEvent],
    /// Words that the neighbour has heard; absent: it could not listen.
    pub(super) heard: Option<&'a [String]>,
}

/// Judges a case that is one attempt.
pub(super) fn judge(case: &Case, evidence: Evidence<'_>) -> Judged {
    let arrived = [
        count(case, evidence.seen, Place::Outside),
        count(case, evidence.seen, Place::Host),
        heard(case, evidence),
    ];
    let mut wrong = Vec::new();
    let verdict = match evidence.finding {
        None => {
            wrong.push("the probe said nothing".to_owned());
            Verdict::NotTried
        }
        Some(finding) if finding.outcome == Outcome::Failed => {
            wrong.push(finding.said.clone());
            Verdict::NotTried
        }
        Some(finding) => match case.expect {
            Expect::Blocked => blocked(case, finding, evidence, arrived, &mut wrong),
            Expect::Pass => passed(case, finding, evidence, arrived, &mut wrong),
        },
    };
    Judged {
        case: case.name.clone(),
        class: case.class,
        why: case.why.clone(),
        verdict,
        tried: case
            .action
            .as_ref()
            .map(|a| format!("{a:?}"))
            .unwrap_or_default(),
        guest: evidence
            .finding
            .map_or_else(String::new, |f| format!("{}: {}", f.outcome.name(), f.said)),
        arrived,
        wrong,
    }
}

fn blocked(
    case: &Case,
    finding: &Finding,
    evidence: Evidence<'_>,
    arrived: [u64; 3],
    wrong: &mut Vec<String>,
) -> Verdict {
    if finding.outcome == Outcome::Ok {
        wrong.push("the guest got an answer".to_owned());
    }
    for (count, place) in arrived
        .iter()
        .zip(["outside", "at the host", "at the neighbour"])
    {
        if *count > 0 {
            wrong.push(format!("{count} packets arrived {place}"));
        }
    }
    if case.asked == Some(false) && was_asked(case, evidence.seen) {
        wrong.push("the name was asked for outside".to_owned());
    }
    if !wrong.is_empty() {
        return Verdict::Breach;
    }
    if !case.outcomes().contains(&finding.outcome) {
        wrong.push("the guest was stopped in another way than it should be".to_owned());
    }
    if !is_told(case, evidence.events) {
        wrong.push(format!(
            "no event with the reason {}",
            case.reasons.join(" or ")
        ));
    }
    if evidence.heard.is_none() {
        wrong.push("the neighbour could not listen".to_owned());
    }
    if wrong.is_empty() {
        Verdict::Pass
    } else {
        Verdict::Unproven
    }
}

fn passed(
    case: &Case,
    finding: &Finding,
    evidence: Evidence<'_>,
    arrived: [u64; 3],
    wrong: &mut Vec<String>,
) -> Verdict {
    if arrived[1] > 0 || arrived[2] > 0 {
        wrong.push("it arrived where it was not for".to_owned());
        return Verdict::Breach;
    }
    if !case.outcomes().contains(&finding.outcome) {
        wrong.push(
            "this must work, and does not: nothing that is blocked proves anything".to_owned(),
        );
    }
    if is_to_outside(case) && arrived[0] == 0 {
        wrong.push("it never arrived outside".to_owned());
    }
    if case.asked == Some(true) && !was_asked(case, evidence.seen) {
        wrong.push("the name was never asked for outside".to_owned());
    }
    if wrong.is_empty() {
        Verdict::Pass
    } else {
        Verdict::Unproven
    }
}

/// Whether the other end of what passes is outside: not so for the gateway's own answers.
fn is_to_outside(case: &Case) -> bool {
    match &case.action {
        Some(Action::Tcp(_) | Action::Udp(_) | Action::Name(_) | Action::Frame(_)) => true,
        Some(_) | None => false,
    }
}

fn count(case: &Case, seen: &[Seen], place: Place) -> u64 {
    // An answer that finds no flow any more is the host's to refuse; it carries the question's words.
    let is_answer = |seen: &Seen| case.receiver().is_some_and(|(to, _)| seen.from == Some(to));
    let counts = |seen: &&Seen| seen.place == place && is_of(seen, case) && !is_answer(seen);
    let count = seen.iter().filter(counts).count();
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// The payload has the case's name, or the receiver is the case's own.
fn is_of(seen: &Seen, case: &Case) -> bool {
    let by_receiver = match (&case.action, case.receiver()) {
        (Some(Action::Tcp(_)), Some((to, port))) => seen.to == Some(to) && seen.port == port,
        // Such a case has a port of its own.
        (Some(Action::Name(to)), _) => case.expect == Expect::Blocked && seen.port == Some(to.port),
        _ => false,
    };
    by_receiver || seen.has(case.word().as_bytes())
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
    let words = evidence.heard.unwrap_or_default();
    u64::from(words.contains(&case.word()))
}

/// Whether the event that the case wants is there, if it wants one.
pub(super) fn is_told(case: &Case, events: &[NetworkEvent]) -> bool {
    case.reasons.is_empty() || events.iter().any(|event| is_about(event, case))
}

fn is_about(event: &NetworkEvent, case: &Case) -> bool {
    if !case.reasons.contains(&event.reason) {
        return false;
    }
    match (case.asked_name(), case.receiver()) {
        (Some(name), None) => event.name.as_deref() == Some(name) || event.name.is_none(),
        // Of frames that cannot be read there is no receiver to tell.
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
        judge(case, evidence).verdict
    }

    #[test]
    fn what_is_blocked_needs_silence_at_both_ends_and_an_event() {
        let case = case("blocked");
        let told = [event("forbidden")];
        assert_eq!(verdict(&case, Outcome::Timeout, &[], &told), Verdict::Pass);
        assert_eq!(
            verdict(&case, Outcome::Timeout, &[], &[event("policy")]),
            Verdict::Unproven
        );
        assert_eq!(verdict(&case, Outcome::Ok, &[], &told), Verdict::Breach);
        for place in [Place::Outside, Place::Host] {
            assert_eq!(
                verdict(&case, Outcome::Timeout, &[seen(place)], &told),
                Verdict::Breach
            );
        }
        assert_eq!(
            verdict(&case, Outcome::Failed, &[], &told),
            Verdict::NotTried
        );
    }

    #[test]
    fn what_passes_has_to_arrive() {
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
    fn a_name_is_asked_for_only_as_a_whole() {
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
    fn a_neighbour_that_hears_is_a_breach_and_one_that_is_deaf_no_proof() {
        let case = case("blocked");
        let silent = finding(Outcome::Timeout);
        let words = [case.word()];
        let mut evidence = Evidence {
            finding: Some(&silent),
            seen: &[],
            events: &[event("forbidden")],
            heard: Some(&words),
        };
        assert_eq!(judge(&case, evidence).verdict, Verdict::Breach);
        evidence.heard = None;
        assert_eq!(judge(&case, evidence).verdict, Verdict::Unproven);
    }
}
