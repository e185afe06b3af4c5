//! Carries out one probe.

mod flows;
mod frames;
mod measured;
mod names;
mod talk;

use std::{
    io,
    time::{Duration, Instant},
};

use netprobe::{Action, Finding, Outcome, Probe};

/// The result of an action: a [`Finding`] without the probe's name.
#[derive(Debug)]
pub(crate) struct Result {
    pub(crate) outcome: Outcome,
    pub(crate) said: String,
    pub(crate) count: u64,
    pub(crate) figures: Vec<u64>,
}

impl Result {
    pub(crate) fn new(outcome: Outcome, said: impl Into<String>) -> Self {
        Self {
            outcome,
            said: said.into(),
            count: 0,
            figures: Vec::new(),
        }
    }

    pub(crate) fn counted(self, count: u64) -> Self {
        Self { count, ..self }
    }

    /// The result of a failed socket operation.
    pub(crate) fn of_error(error: &io::Error) -> Self {
        use io::ErrorKind as Kind;
        let outcome = match error.kind() {
            Kind::ConnectionRefused
            | Kind::ConnectionReset
            | Kind::UnexpectedEof
            | Kind::BrokenPipe => Outcome::Refused,
            Kind::TimedOut | Kind::WouldBlock => Outcome::Timeout,
            Kind::HostUnreachable
            | Kind::NetworkUnreachable
            | Kind::NetworkDown
            | Kind::AddrNotAvailable
            | Kind::PermissionDenied
            | Kind::InvalidInput => Outcome::Unreachable,
            _ => Outcome::Failed,
        };
        Self::new(outcome, error.to_string())
    }

    /// The result of an attempt that could not be made, for example because the card could not be opened.
    pub(crate) fn not_tried(error: &io::Error) -> Self {
        Self::new(Outcome::Failed, error.to_string())
    }
}

pub(crate) fn carry_out(probe: &Probe) -> Finding {
    let result = run(probe);
    Finding {
        name: probe.name.clone(),
        outcome: result.outcome,
        said: result.said,
        count: result.count,
        figures: result.figures,
    }
}

/// Performs the actions in `first`, then the action of the probe.
fn run(probe: &Probe) -> Result {
    for action in &probe.first {
        let done = act(action, probe);
        if done.outcome != Outcome::Ok {
            let why = format!(
                "the preceding action {action:?} ended with {}: {}",
                done.outcome.name(),
                done.said
            );
            return Result::new(Outcome::Failed, why);
        }
    }
    act(&probe.action, probe)
}

fn act(action: &Action, probe: &Probe) -> Result {
    let word = &probe.name;
    let within = Duration::from_millis(probe.within_ms);
    let deadline = Instant::now() + within;
    match action {
        Action::Tcp(to) => talk::tcp(*to, word, deadline),
        Action::Udp(to) => talk::udp(*to, word, deadline),
        Action::Dns(query) => names::ask(query, deadline),
        Action::Name(service) => names::reach(service, word, within),
        Action::Frame(frame) => frames::send(frame, word, deadline),
        Action::Arp(asked) => frames::arp(*asked, deadline),
        Action::Solicit(asked) => frames::solicit(*asked, deadline),
        Action::Flood {
            to,
            addresses,
            ports,
        } => flows::flood(*to, *addresses, *ports, word),
        Action::Numbered { to, every_ms } => flows::numbered(*to, *every_ms, word, deadline),
        Action::Stream { to, every_ms } => flows::stream(*to, *every_ms, word, deadline),
        Action::Requests { to, count } => flows::requests(*to, *count, word, deadline),
        Action::Unfit(to) => frames::unfit(*to, word),
        Action::Begin { to, count } => frames::begin(*to, *count, deadline),
        Action::Pulse { to, every_us } => {
            measured::pulse(*to, Duration::from_micros(*every_us), word, deadline)
        }
        Action::Echo(to) => measured::echo(*to, deadline),
        Action::Source(to) => measured::source(*to, deadline),
        Action::Sink(to) => measured::sink(*to, deadline),
        Action::Hear { words, until } => frames::hear(words, until, deadline),
        Action::Wait(ms) => {
            std::thread::sleep(Duration::from_millis(*ms));
            Result::new(Outcome::Ok, "")
        }
    }
}
