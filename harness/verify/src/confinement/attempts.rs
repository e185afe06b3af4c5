//! What a taken-over VMM may try, by class: data, with the calls that make the attempt.

mod code;
mod descriptors;
mod devices;
mod files;
mod groups;
mod kernel;
mod memory;
mod namespaces;
mod privileges;
mod processes;
mod settings;
mod signals;
mod sockets;

use std::{fmt::Write, io};

use nix::{errno::Errno, sys::signal::Signal};
use serde::{Deserialize, Serialize};

use super::{
    intruder::{Intruder, Stop, Try},
    scene::Scene,
};

/// What an attempt is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Files of the host, of the template, of anybody.
    Files,
    /// Memory and descriptors of other sandboxes.
    Memory,
    /// Other ends of sockets.
    Sockets,
    /// Signals to others.
    Signals,
    /// Control of other processes.
    Ptrace,
    /// Processes and programs.
    Processes,
    /// Memory that can be executed.
    Code,
    /// KVM, the TAP, and other devices.
    Devices,
    /// Control groups.
    Groups,
    /// Settings in /proc and /sys.
    Settings,
    /// What it has open.
    Descriptors,
    /// User, capabilities, and what guards them.
    Privileges,
    /// Namespaces, mounts, roots.
    Namespaces,
    /// Other large interfaces of the kernel.
    Kernel,
    /// Limits.
    Limits,
    /// What /proc says of the process, without any attempt.
    State,
}

impl Class {
    /// The name in reports and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Memory => "memory",
            Self::Sockets => "sockets",
            Self::Signals => "signals",
            Self::Ptrace => "ptrace",
            Self::Processes => "processes",
            Self::Code => "code",
            Self::Devices => "devices",
            Self::Groups => "groups",
            Self::Settings => "settings",
            Self::Descriptors => "descriptors",
            Self::Privileges => "privileges",
            Self::Namespaces => "namespaces",
            Self::Kernel => "kernel",
            Self::Limits => "limits",
            Self::State => "state",
        }
    }
}

/// An answer by which the kernel refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Error(Errno),
    Death(Signal),
    /// The calls may be answered: what they ask for is not done.
    Nothing,
}

impl Refusal {
    /// Whether an attempt ended in this way.
    pub(super) fn is(self, stop: &Stop) -> bool {
        match (self, stop) {
            (Self::Error(wanted), Stop::Refused(_, errno)) => wanted == *errno,
            (Self::Death(wanted), Stop::Killed(_, signal)) => wanted == *signal,
            (Self::Nothing, Stop::Futile(_)) => true,
            _ => false,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Error(errno) => format!("{errno:?}"),
            Self::Death(signal) => signal.to_string(),
            Self::Nothing => "no effect".to_owned(),
        }
    }
}

/// The filter's answer and those of the kernel's checks of rights.
pub(super) const USUAL: &[Refusal] = &[
    Refusal::Death(Signal::SIGSYS),
    Refusal::Error(Errno::EACCES),
    Refusal::Error(Errno::EPERM),
];

/// Only the filter stands in the way.
const FILTER: &[Refusal] = &[Refusal::Death(Signal::SIGSYS)];

/// What an attempt made of the world, if anything.
pub(super) type Seen = io::Result<Option<String>>;

/// One attempt.
pub(super) struct Attempt {
    /// Unique among all.
    pub(super) name: &'static str,
    pub(super) class: Class,
    /// What would be lost.
    pub(super) why: &'static str,
    /// How the kernel may refuse.
    pub(super) refusals: &'static [Refusal],
    /// Succeeds if it got what it wanted.
    pub(super) act: fn(&mut Intruder, &Scene) -> Try<()>,
    /// The look from outside; says what was done, if it was.
    pub(super) look: fn(&Scene, &Intruder) -> Seen,
}

impl Attempt {
    /// How the kernel may refuse, in words.
    pub(super) fn expected(&self) -> String {
        let mut text = String::new();
        for (n, refusal) in self.refusals.iter().enumerate() {
            let between = if n == 0 { "" } else { " or " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{between}{}", refusal.name());
        }
        text
    }
}

/// All attempts, in the order of their classes.
pub(super) fn all() -> Vec<&'static Attempt> {
    [
        files::ATTEMPTS,
        memory::ATTEMPTS,
        sockets::ATTEMPTS,
        signals::ATTEMPTS,
        processes::ATTEMPTS,
        code::ATTEMPTS,
        devices::ATTEMPTS,
        groups::ATTEMPTS,
        settings::ATTEMPTS,
        descriptors::ATTEMPTS,
        privileges::ATTEMPTS,
        namespaces::ATTEMPTS,
        kernel::ATTEMPTS,
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What was wanted is an answer, which the attempt itself compares: there is nothing else to see.
fn answer_alone(_: &Scene, _: &Intruder) -> Seen {
    Ok(None)
}

/// A fault of the scene is none of the VMM's.
fn staged<T>(found: io::Result<T>) -> Try<T> {
    found.map_err(|error| Stop::Broken(error.to_string()))
}

fn when(happened: bool, what: &str) -> Seen {
    Ok(happened.then(|| what.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn attempts_are_many_and_in_every_class() {
        let mut names = BTreeSet::new();
        let mut classes: BTreeMap<Class, u32> = BTreeMap::new();
        for attempt in all() {
            let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
            assert!(attempt.name.bytes().all(plain), "{}", attempt.name);
            assert!(
                names.insert(attempt.name),
                "{} is there twice",
                attempt.name
            );
            assert!(attempt.why.ends_with('.'), "{}", attempt.name);
            assert!(!attempt.refusals.is_empty(), "{}", attempt.name);
            *classes.entry(attempt.class).or_default() += 1;
        }
        assert!(names.len() >= 40, "{}", names.len());
        assert_eq!(classes.len(), 15, "{classes:?}");
        assert!(classes.values().all(|count| *count >= 2), "{classes:?}");
    }
}
