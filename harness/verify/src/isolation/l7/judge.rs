//! Derives the result of an attempt from the observations of the guest, the requests that arrived at the servers,
//! and the records of `cube-api`. The functions are pure.

use serde::Deserialize;

use super::attempts::{Attempt, Expect};
use crate::{
    isolation::{cases::Class, observed::Observed},
    report::{Case, Verdict},
};

/// Value that the guest sends in the rule's header.
pub(super) const OWN: &str = "guests-own";

/// Report of the guest's program about an attempt.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Finding {
    pub(super) name: String,
    statuses: Vec<u16>,
    /// Beginning of the data that the guest received, as Latin-1.
    text: String,
    /// `open`, `closed`, `reset`, `alert`, `timeout`, `goaway`, or an error.
    ended: String,
    issuer: String,
    alpn: Option<String>,
    #[serde(default)]
    ticket: bool,
}

/// A connection that a server accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    /// The ClientHello, if any, and all data within TLS.
    pub(super) bytes: Vec<u8>,
    pub(super) requests: usize,
}

impl Arrival {
    pub(super) fn has(&self, text: &str) -> bool {
        memchr::memmem::find(&self.bytes, text.as_bytes()).is_some()
    }
}

/// A refusal in the server's list of events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// Host name and path.
    pub(super) about: String,
}

/// The observations of all attempts.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) findings: Vec<Finding>,
    pub(super) arrivals: Vec<Arrival>,
    pub(super) refusals: Vec<Refusal>,
}

/// Statuses of refusals whose record contains the request's path, so that an event is expected.
const RECORDED: [u16; 2] = [405, 421];

/// Whether the events contain the case's refusal, or need not contain it.
pub(super) fn is_recorded(case: &Attempt, refusals: &[Refusal]) -> bool {
    let is_needed = case.expect == Expect::Refused
        && case.status.iter().all(|status| RECORDED.contains(status));
    !is_needed || case.status.is_empty() || refusals.iter().any(|r| r.about.contains(&case.name))
}

/// Outcome of an attempt at the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Refused,
    Ruled,
    Bare,
    /// With the guest's own header instead of, or in addition to, the rule's.
    Own,
}

impl Outcome {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Ruled => "with the header",
            Self::Bare => "without the header",
            Self::Own => "with the guest's header",
        }
    }
}

pub(super) fn outcome(case: &Attempt, seen: &Seen, secret: &str) -> Outcome {
    let mut arrived = seen
        .arrivals
        .iter()
        .filter(|arrival| arrival.has(&case.name))
        .peekable();
    if arrived.peek().is_none() {
        return Outcome::Refused;
    }
    // A name without a rule passes unread.
    if case.expect != Expect::Bare && arrived.clone().any(|arrival| arrival.has(OWN)) {
        Outcome::Own
    } else if arrived.any(|arrival| arrival.has(secret)) {
        Outcome::Ruled
    } else {
        Outcome::Bare
    }
}

pub(super) fn judge(case: &Attempt, seen: &Seen, secret: &str) -> Case {
    let finding = seen
        .findings
        .iter()
        .find(|finding| finding.name == case.name);
    let arrived: Vec<_> = seen
        .arrivals
        .iter()
        .filter(|arrival| arrival.has(&case.name))
        .collect();
    let report = Case {
        expected: expected(case),
        ..Case::new(Class::L7.name(), &case.name, &case.why)
    };
    let report = report
        .with("tried", case.summary())
        .with("arrived", format!("{} at the servers", arrived.len()));
    let Some(finding) = finding else {
        let problem = "the guest's program reported nothing about it";
        return report.judged(Verdict::NotTried, [problem]);
    };
    let mut found = Observed {
        guest: observed(finding),
        ..Observed::default()
    };
    judge_guest(&mut found, case, finding, secret);
    judge_servers(&mut found, case, &arrived, secret);
    found.doubt_unless(
        is_recorded(case, &seen.refusals),
        "the server lists no refusal of this request",
    );
    found.judge(report)
}

fn expected(case: &Attempt) -> String {
    let what = match case.expect {
        Expect::Ruled => "arrives with the rule's header",
        Expect::Bare => "arrives without the rule's header",
        Expect::Refused => "does not arrive",
        Expect::RuledOrRefused => "arrives with the rule's header, or does not arrive",
        Expect::Echoed => "arrives, and the server shows the header to the guest",
    };
    match case.status.as_slice() {
        [] => what.to_owned(),
        statuses => format!("{what}, status {statuses:?}"),
    }
}

fn observed(finding: &Finding) -> String {
    let statuses: Vec<String> = finding.statuses.iter().map(u16::to_string).collect();
    match statuses.as_slice() {
        [] => finding.ended.clone(),
        statuses => format!("{}, {}", statuses.join(" "), finding.ended),
    }
}

fn judge_guest(found: &mut Observed, case: &Attempt, finding: &Finding, secret: &str) {
    let has_secret = finding.text.contains(secret);
    if case.expect == Expect::Echoed {
        found.doubt_unless(has_secret, "the server's answer does not show the header");
    } else {
        found.breach_if(has_secret, "the guest received the secret");
    }
    for text in &case.never {
        let received = format!("the guest received {text:?}");
        found.breach_if(finding.text.contains(text), received);
    }
    let last = finding.statuses.last();
    let is_expected = match (case.expect, case.status.as_slice()) {
        // HTTP/2 responses arrive in any order.
        (Expect::Refused, [_, ..]) => {
            let mut statuses = finding.statuses.iter();
            statuses.any(|status| case.status.contains(status))
        }
        (_, [_, ..]) => last.is_some_and(|last| case.status.contains(last)),
        (Expect::Ruled | Expect::Bare | Expect::Echoed, []) => last == Some(&200),
        // An alert, the end of the connection, or an HTTP error.
        (Expect::Refused, []) => {
            let is_end = ["alert", "closed", "reset", "goaway"].contains(&&*finding.ended);
            // The response was not TLS.
            let is_end = is_end || finding.ended.starts_with("tls: ");
            is_end || last.is_some_and(|last| *last >= 400)
        }
        (Expect::RuledOrRefused, []) => true,
    };
    found.doubt_unless(is_expected, format!("the guest saw: {}", observed(finding)));
    if let Some(issuer) = &case.issuer {
        let is_other = finding.issuer != *issuer;
        found.breach_if(
            is_other,
            format!("the certificate was issued by: {}", finding.issuer),
        );
    }
    if let Some(protocol) = &case.protocol {
        let offered = format!("the protocol is {:?}", finding.alpn);
        found.doubt_unless(finding.alpn.as_ref() == Some(protocol), offered);
    }
    if let Some(ticket) = case.ticket {
        found.breach_if(
            finding.ticket != ticket,
            "the guest got a ticket of a session",
        );
    }
}

fn judge_servers(found: &mut Observed, case: &Attempt, arrived: &[&Arrival], secret: &str) {
    let with_secret = arrived.iter().filter(|arrival| arrival.has(secret)).count();
    let with_own = arrived.iter().any(|arrival| arrival.has(OWN));
    let is_ruled = with_secret == arrived.len();
    match case.expect {
        Expect::Refused => found.breach_if(!arrived.is_empty(), "it arrived at a server"),
        Expect::Bare => {
            found.doubt_unless(!arrived.is_empty(), "it did not arrive");
            found.breach_if(with_secret > 0, "a request without rule had the secret");
        }
        Expect::Ruled | Expect::Echoed | Expect::RuledOrRefused => {
            let may_be_refused = case.expect == Expect::RuledOrRefused;
            found.doubt_unless(may_be_refused || !arrived.is_empty(), "it did not arrive");
            found.breach_if(with_own, "the guest's own header arrived");
            found.breach_if(!is_ruled, "it arrived without the rule's header");
        }
    }
    if let Some(text) = &case.arrives_without {
        let has = arrived.iter().any(|arrival| arrival.has(text));
        found.breach_if(has, format!("{text:?} arrived"));
    }
    let requests: usize = arrived.iter().map(|arrival| arrival.requests).sum();
    found.breach_if(
        case.once && requests > 1,
        "a server saw more than one request",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isolation::l7::attempts::load;

    fn judged(name: &str, finding: Finding, bytes: &[&str]) -> Verdict {
        let list = load().unwrap();
        let case = list.cases.iter().find(|case| case.name == name).unwrap();
        let arrivals = bytes.iter().map(|bytes| Arrival {
            bytes: bytes.as_bytes().to_vec(),
            requests: 1,
        });
        let seen = Seen {
            findings: vec![Finding {
                name: name.to_owned(),
                ..finding
            }],
            arrivals: arrivals.collect(),
            refusals: vec![Refusal {
                about: format!("host /{name}"),
            }],
        };
        judge(case, &seen, "hunter2").verdict
    }

    fn answered(status: u16, text: &str) -> Finding {
        Finding {
            statuses: vec![status],
            text: text.to_owned(),
            ended: "open".to_owned(),
            ..Finding::default()
        }
    }

    #[test]
    fn a_ruled_request_needs_its_header_and_no_other() {
        let name = "l7-rule-applies";
        let arrived = |header: &str| format!("GET /{name} HTTP/1.1\r\nx-api-key: {header}\r\n\r\n");
        let ok = || answered(200, "ok");
        assert_eq!(judged(name, ok(), &[&arrived("hunter2")]), Verdict::Pass);
        assert_eq!(judged(name, ok(), &[&arrived(OWN)]), Verdict::Breach);
        assert_eq!(judged(name, ok(), &[&arrived("")]), Verdict::Breach);
        assert_eq!(judged(name, ok(), &[]), Verdict::Unproven);
        let both = arrived("hunter2\r\nx-api-key: guests-own");
        assert_eq!(judged(name, ok(), &[&both]), Verdict::Breach);
        let told = answered(200, "hunter2");
        assert_eq!(judged(name, told, &[&arrived("hunter2")]), Verdict::Breach);
    }

    #[test]
    fn a_refused_request_must_not_arrive_and_be_answered_as_expected() {
        let name = "l7-host-of-another-name";
        assert_eq!(judged(name, answered(421, ""), &[]), Verdict::Pass);
        assert_eq!(judged(name, answered(421, ""), &[name]), Verdict::Breach);
        assert_eq!(judged(name, answered(200, ""), &[]), Verdict::Unproven);
        let silent = Finding {
            ended: "timeout".to_owned(),
            ..Finding::default()
        };
        assert_eq!(judged("l7-sni-absent", silent, &[]), Verdict::Unproven);
    }
}
