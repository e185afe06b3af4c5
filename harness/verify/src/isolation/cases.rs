//! The cases: data in `harness/verify/isolation/*.toml`, one file for each policy under which they are tried.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use netprobe::{Action, Outcome};
use serde::{Deserialize, Serialize};

/// Name and text of each file.
const FILES: [(&str, &str); 7] = [
    ("closed", include_str!("../../isolation/closed.toml")),
    ("narrow", include_str!("../../isolation/narrow.toml")),
    ("internet", include_str!("../../isolation/internet.toml")),
    ("edges", include_str!("../../isolation/edges.toml")),
    ("names", include_str!("../../isolation/names.toml")),
    ("offload", include_str!("../../isolation/offload.toml")),
    ("lives", include_str!("../../isolation/lives.toml")),
];

/// What a case is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// The network works at all.
    Control,
    /// Other sandboxes.
    Sibling,
    /// The host that the sandbox runs on.
    Host,
    /// Metadata services of clouds.
    Metadata,
    /// Ranges that are nobody's on the internet.
    Reserved,
    /// What a policy's lists say, to the last address.
    Policy,
    /// Senders that the sandbox is not.
    Spoof,
    /// Frames that are no plain packets.
    Frame,
    /// Packets whose headers hide or lie.
    Header,
    /// Frames of which something is left to the card or the host.
    Offload,
    /// Protocols that never pass.
    Protocol,
    /// Other name servers.
    Dns,
    /// Names, and where they lead.
    Name,
    /// Changes of the policy while packets flow.
    Update,
    /// What comes in unasked.
    Inbound,
    /// Load by a neighbour.
    Load,
    /// Pause, fork, reuse, and death of the server.
    Life,
}

impl Class {
    /// The name in reports and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Sibling => "sibling",
            Self::Host => "host",
            Self::Metadata => "metadata",
            Self::Reserved => "reserved",
            Self::Policy => "policy",
            Self::Spoof => "spoof",
            Self::Frame => "frame",
            Self::Header => "header",
            Self::Offload => "offload",
            Self::Protocol => "protocol",
            Self::Dns => "dns",
            Self::Name => "name",
            Self::Update => "update",
            Self::Inbound => "inbound",
            Self::Load => "load",
            Self::Life => "life",
        }
    }

    /// Whether it is about what a policy lets out, which is what `verify egress` looks at.
    #[must_use]
    pub fn is_egress(self) -> bool {
        match self {
            Self::Control
            | Self::Offload
            | Self::Metadata
            | Self::Reserved
            | Self::Policy
            | Self::Dns
            | Self::Name
            | Self::Update => true,
            Self::Sibling
            | Self::Host
            | Self::Spoof
            | Self::Frame
            | Self::Header
            | Self::Protocol
            | Self::Inbound
            | Self::Load
            | Self::Life => false,
        }
    }
}

/// How a case should end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expect {
    /// The answer comes, and the other end has seen the question.
    Pass,
    /// No answer comes, and nobody has seen anything.
    Blocked,
}

/// A case that takes more than one attempt: code in `scripts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Script {
    /// An open connection to what becomes denied.
    Cut,
    /// Changes to and fro while datagrams flow.
    Churn,
    /// An empty update.
    Clear,
    /// Packets to the ports of the address translation.
    Unsolicited,
    /// ICMP errors about flows that are not the guest's.
    Forged,
    /// Late packets for a predecessor.
    Late,
    /// A successor on the same device.
    Reuse,
    /// Pause and resume.
    Pause,
    /// Fork.
    Fork,
    /// SIGKILL of the server, and a successor.
    Crash,
    /// A hundred thousand flows beside a neighbour.
    Flood,
    /// All ports towards one remote end.
    Ports,
    /// Headers before frames that do not fit them, from inside the guest; the host finishes packets.
    UnfitFromGuest,
    /// The same; the uplink finishes packets.
    UnfitFromGuestByCard,
    /// The same, by whoever has the VMM's descriptor of the TAP; the host finishes packets.
    UnfitAtTap,
    /// The same; the uplink finishes packets.
    UnfitAtTapByCard,
}

/// One case.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Unique among all.
    pub name: String,
    /// See [`Class`].
    pub class: Class,
    /// What would be wrong if it ended otherwise.
    pub why: String,
    /// What the guest tries; absent where `script` is given.
    #[serde(rename = "do")]
    pub action: Option<Action>,
    /// What it does before.
    #[serde(default)]
    pub first: Vec<Action>,
    /// See [`Script`].
    pub script: Option<Script>,
    /// See [`Expect`].
    pub expect: Expect,
    /// Ends that the guest may see; empty: `ok` for a pass, any refusal for what is blocked.
    #[serde(default)]
    pub guest: Vec<Outcome>,
    /// Reasons of which the server must tell one in an event; empty: none is looked for.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// Whether the name must (or must not) have been asked for outside; absent: either will do.
    pub asked: Option<bool>,
}

/// Cases under one policy.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Name of its file.
    #[serde(skip)]
    pub name: String,
    /// Body of the create, beside the template: E2B's own options.
    #[serde(default)]
    pub create: serde_json::Map<String, serde_json::Value>,
    /// Its cases.
    #[serde(rename = "case")]
    pub cases: Vec<Case>,
}

/// Why the cases are none. They are part of the program: this is a bug.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    /// Not TOML of the right shape.
    #[error("the cases in isolation/{file}.toml are not readable")]
    Toml {
        /// Which file.
        file: &'static str,
        /// The cause.
        #[source]
        source: toml::de::Error,
    },
    /// A value that cannot be.
    #[error("case {name}: {what}")]
    Value {
        /// Its name.
        name: String,
        /// What is wrong.
        what: &'static str,
    },
}

/// Reads all cases.
///
/// # Errors
/// See [`CaseError`].
pub fn load() -> Result<Vec<Group>, CaseError> {
    let mut names = BTreeSet::new();
    let mut groups = Vec::new();
    for (file, text) in FILES {
        let mut group: Group =
            toml::from_str(text).map_err(|source| CaseError::Toml { file, source })?;
        group.name = file.to_owned();
        for case in &group.cases {
            let is_new = names.insert(case.name.clone());
            check(case, is_new).map_err(|what| CaseError::Value {
                name: case.name.clone(),
                what,
            })?;
        }
        groups.push(group);
    }
    Ok(groups)
}

fn check(case: &Case, is_new: bool) -> Result<(), &'static str> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    match case {
        _ if !is_new => Err("it is there twice"),
        // Short enough that a packet that is cut still has it.
        _ if case.name.len() < 8 || case.name.len() > 48 || !case.name.bytes().all(plain) => {
            Err("its name is not 8 to 48 small letters, digits and hyphens")
        }
        _ if case.why.is_empty() => Err("it has no reason"),
        _ if case.action.is_some() == case.script.is_some() => {
            Err("it has not one of `do` and `script`")
        }
        _ => Ok(()),
    }
}

impl Case {
    /// What every payload of it has, and no payload of another case.
    #[must_use]
    pub fn word(&self) -> String {
        format!("[{}]", self.name)
    }

    /// Ends that the guest may see.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        match self.expect {
            _ if !self.guest.is_empty() => &self.guest,
            Expect::Pass => &[Outcome::Ok],
            Expect::Blocked => &[Outcome::Refused, Outcome::Timeout, Outcome::Unreachable],
        }
    }

    /// Where the packets are for.
    #[must_use]
    pub fn receiver(&self) -> Option<(IpAddr, Option<u16>)> {
        let of = |to: &SocketAddr| Some((to.ip(), Some(to.port())));
        match self.action.as_ref()? {
            Action::Tcp(to) | Action::Udp(to) => of(to),
            Action::Dns(query) => query.server.as_ref().and_then(of),
            Action::Frame(frame) => Some((frame.to?, None)),
            _ => None,
        }
    }

    /// The name that is asked for.
    #[must_use]
    pub fn asked_name(&self) -> Option<&str> {
        match self.action.as_ref()? {
            Action::Dns(query) => Some(&query.name),
            Action::Name(service) => Some(&service.name),
            _ => None,
        }
    }
}

/// Ports that somebody has to listen at for the cases to mean anything.
#[must_use]
pub fn ports(groups: &[Group]) -> BTreeSet<u16> {
    let actions = groups.iter().flat_map(|group| &group.cases);
    let ports = actions.filter_map(|case| match case.action.as_ref()? {
        Action::Tcp(to) | Action::Udp(to) => Some(to.port()),
        Action::Name(service) => Some(service.port),
        Action::Frame(frame) => Some(frame.port),
        _ => None,
    });
    ports.filter(|port| *port != 0 && *port != 53).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Case> {
        let groups = load().unwrap();
        groups.into_iter().flat_map(|group| group.cases).collect()
    }

    #[test]
    fn the_cases_are_readable_and_many() {
        let cases = all();
        assert!(cases.len() >= 60, "{}", cases.len());
        for case in &cases {
            let is_attempt = case.expect == Expect::Blocked && case.script.is_none();
            let is_told = !case.reasons.is_empty() || case.why.contains("No event");
            assert!(!is_attempt || is_told, "{}", case.name);
        }
    }

    #[test]
    fn what_is_blocked_has_its_twin_that_passes() {
        let cases = all();
        let has = |class, expect| cases.iter().any(|c| c.class == class && c.expect == expect);
        assert!(has(Class::Control, Expect::Pass));
        for class in [
            Class::Policy,
            Class::Name,
            Class::Dns,
            Class::Host,
            Class::Frame,
            Class::Header,
        ] {
            assert!(
                has(class, Expect::Pass) && has(class, Expect::Blocked),
                "{class:?}"
            );
        }
    }

    /// A connection's first packet has no payload, and an answer to a frame is known by its sender: the receiver alone
    /// tells cases apart.
    #[test]
    fn no_two_cases_of_a_policy_have_the_same_receiver() {
        for group in load().unwrap() {
            let mut seen = BTreeSet::new();
            for case in &group.cases {
                let receiver = match &case.action {
                    Some(Action::Tcp(to)) => *to,
                    Some(Action::Frame(frame)) => (frame.to.unwrap(), frame.port).into(),
                    _ => continue,
                };
                assert!(seen.insert(receiver), "{}: {receiver}", case.name);
            }
        }
    }
}
