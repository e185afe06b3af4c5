//! The cases, from `harness/verify/isolation/*.toml`: one file for each policy that cases run under.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use netprobe::{Action, Outcome};
use serde::Deserialize;

use crate::setup::ListError;

/// Name and content of each file.
const FILES: [(&str, &str); 7] = [
    ("closed", include_str!("../../isolation/closed.toml")),
    ("narrow", include_str!("../../isolation/narrow.toml")),
    ("internet", include_str!("../../isolation/internet.toml")),
    ("edges", include_str!("../../isolation/edges.toml")),
    ("names", include_str!("../../isolation/names.toml")),
    ("offload", include_str!("../../isolation/offload.toml")),
    ("lives", include_str!("../../isolation/lives.toml")),
];

/// Subject of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Traffic that must get through.
    Control,
    /// Other sandboxes.
    Sibling,
    /// The host that the sandbox runs on.
    Host,
    /// Metadata services of clouds.
    Metadata,
    /// Address ranges that are not routed on the internet.
    Reserved,
    /// Addresses in a policy's lists, and at their edges.
    Policy,
    /// Forged sender addresses.
    Spoof,
    /// Frames that are not plain IP packets.
    Frame,
    /// Packets with misleading headers.
    Header,
    /// Frames that leave checksum or segmentation to the network device or the host.
    Offload,
    /// IP protocols that are always blocked.
    Protocol,
    /// DNS requests to servers other than the gateway.
    Dns,
    /// Names in a policy, and the addresses that they resolve to.
    Name,
    /// Changes of the policy while packets flow.
    Update,
    /// Packets from outside that belong to no flow.
    Inbound,
    /// Load by another sandbox.
    Load,
    /// Pause, fork, reuse of a device, and death of the server.
    Life,
    /// Requests through the egress proxy that pretend to be different ones.
    L7,
    /// Places that must not contain a secret after its use.
    Secrets,
}

impl Class {
    /// Name in reports and on the command line.
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
            Self::L7 => "l7",
            Self::Secrets => "secrets",
        }
    }

    /// Whether `verify egress` includes the class: the classes about allowed destinations.
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
            | Self::Update
            | Self::L7
            | Self::Secrets => true,
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

/// Expected result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expect {
    /// The guest gets a response, and the other end has seen the request.
    Pass,
    /// The guest gets no response from the receiver, and no packet arrives anywhere.
    Blocked,
}

/// Code in `scripts`, for a case that takes more than one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Script {
    /// An open connection whose receiver becomes denied.
    Cut,
    /// Policy changes back and forth while datagrams flow.
    Churn,
    /// An empty policy update.
    Clear,
    /// Packets to the ports of the address translation.
    Unsolicited,
    /// ICMP errors about flows that the guest does not have.
    Forged,
    /// Late packets for a sandbox that has ended.
    Late,
    /// A new sandbox on the device of an ended one.
    Reuse,
    /// Pause and resume.
    Pause,
    /// Fork.
    Fork,
    /// The server is killed with SIGKILL, and a new one is started.
    Crash,
    /// A hundred thousand flows while a neighbour makes requests.
    Flood,
    /// All translation ports towards one receiver.
    Ports,
    /// Virtio headers that do not fit their frame, from inside the guest. The host fills in checksums.
    UnfitFromGuest,
    /// Like `UnfitFromGuest`, but the uplink fills in checksums.
    UnfitFromGuestByCard,
    /// Virtio headers that do not fit their frame, written to the TAP through the VMM's descriptor. The host fills in
    /// checksums.
    UnfitAtTap,
    /// Like `UnfitAtTap`, but the uplink fills in checksums.
    UnfitAtTapByCard,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Unique among all cases.
    pub name: String,
    pub class: Class,
    /// The consequence of any other result.
    pub why: String,
    /// Attempt of the guest. `None` if and only if there is a script.
    #[serde(rename = "do")]
    pub action: Option<Action>,
    /// Actions before the attempt.
    #[serde(default)]
    pub first: Vec<Action>,
    pub script: Option<Script>,
    pub expect: Expect,
    /// Outcomes that the guest may observe. Empty: `ok` for a case that must pass, any refusal for a blocked one.
    #[serde(default)]
    pub guest: Vec<Outcome>,
    /// The server must report an event with one of these reasons. Empty: events are not checked.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// Whether the name must, or must not, be looked up outside. `None`: not checked.
    pub asked: Option<bool>,
}

/// The cases that run under one policy.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Name of the file.
    #[serde(skip)]
    pub name: String,
    /// Options of the sandbox, as in the body of E2B's create request.
    #[serde(default)]
    pub create: serde_json::Map<String, serde_json::Value>,
    #[serde(rename = "case")]
    pub cases: Vec<Case>,
}

/// Decodes all cases.
///
/// # Errors
/// Returns a [`ListError`] if a file or a case in it is invalid, which is a bug in this program.
pub fn load() -> Result<Vec<Group>, ListError> {
    let mut names = BTreeSet::new();
    let mut groups = Vec::new();
    for (file, text) in FILES {
        let mut group: Group =
            toml::from_str(text).map_err(|source| ListError::Toml { list: file, source })?;
        group.name = file.to_owned();
        for case in &group.cases {
            let is_new = names.insert(case.name.clone());
            check(case, is_new).map_err(|fault| ListError::Entry {
                list: file,
                entry: case.name.clone(),
                fault: fault.to_owned(),
            })?;
        }
        groups.push(group);
    }
    Ok(groups)
}

fn check(case: &Case, is_new: bool) -> Result<(), &'static str> {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    match case {
        _ if !is_new => Err("another case has the same name"),
        // Short enough to be within a truncated packet.
        _ if case.name.len() < 8 || case.name.len() > 48 || !case.name.bytes().all(is_plain) => {
            Err("the name must be 8 to 48 lower-case letters, digits and hyphens")
        }
        _ if case.why.is_empty() => Err("`why` is empty"),
        _ if case.action.is_some() == case.script.is_some() => {
            Err("exactly one of `do` and `script` must be given")
        }
        _ => Ok(()),
    }
}

impl Group {
    /// Prints the progress of a run.
    pub(super) fn announce(&self) {
        let (count, name) = (self.cases.len(), &self.name);
        eprintln!("cube-bench: {count} cases under the policy {name}");
    }
}

impl Case {
    /// Text that is in each payload of this case and in no payload of another case.
    #[must_use]
    pub fn payload(&self) -> String {
        format!("[{}]", self.name)
    }

    /// Outcomes that the guest may observe.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        match self.expect {
            _ if !self.guest.is_empty() => &self.guest,
            Expect::Pass => &[Outcome::Ok],
            Expect::Blocked => &[Outcome::Refused, Outcome::Timeout, Outcome::Unreachable],
        }
    }

    /// Address and port to which the packets are sent; the port is `None` for frames.
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

    /// The name that the guest looks up.
    #[must_use]
    pub fn asked_name(&self) -> Option<&str> {
        match self.action.as_ref()? {
            Action::Dns(query) => Some(&query.name),
            Action::Name(service) => Some(&service.name),
            _ => None,
        }
    }
}

/// Ports at which peers must listen for the cases to prove anything. Port 53 is the name server's.
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
    fn all_cases_load_and_blocked_ones_expect_an_event() {
        let cases = all();
        assert!(cases.len() >= 60, "{}", cases.len());
        for case in &cases {
            let is_attempt = case.expect == Expect::Blocked && case.script.is_none();
            let is_reported = !case.reasons.is_empty() || case.why.contains("No event");
            assert!(!is_attempt || is_reported, "{}", case.name);
        }
    }

    #[test]
    fn classes_of_blocked_cases_have_control_cases() {
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

    /// The first packet of a connection has no payload, and the reply to a frame is recognized by its sender. Only
    /// the receiver therefore distinguishes such cases.
    #[test]
    fn cases_of_one_policy_have_different_receivers() {
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
