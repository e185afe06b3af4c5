//! The parts of an attempt: its class, the refusals that pass, and the functions that make and observe it.

use std::{fmt::Write, io};

use nix::{errno::Errno, sys::signal::Signal};

use crate::confinement::{
    intruder::{Intruder, Stop, Try},
    scene::Scene,
};

/// Subject of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::confinement) enum Class {
    /// Files of the host, of the template, and of other users.
    Files,
    /// Memory and descriptors of other sandboxes.
    Memory,
    /// Sockets of other processes.
    Sockets,
    /// Signals to other processes.
    Signals,
    /// Control of other processes.
    Ptrace,
    /// New processes and programs.
    Processes,
    /// Executable memory.
    Code,
    /// KVM, the TAP, and other devices.
    Devices,
    /// Cgroups.
    Groups,
    /// Settings in /proc and /sys.
    Settings,
    /// The VMM's own descriptors.
    Descriptors,
    /// User, capabilities, and the settings that protect them.
    Privileges,
    /// Namespaces, mounts and root directories.
    Namespaces,
    /// Other large interfaces of the kernel.
    Kernel,
    /// Resource limits.
    Limits,
    /// State of the VMM in /proc, without an attempt.
    State,
    /// Attempts and state of `cube-egress`.
    Egress,
    /// Attempts and state of `cube-image`.
    Image,
}

impl Class {
    /// Name in reports and on the command line.
    #[must_use]
    pub(in crate::confinement) fn name(self) -> &'static str {
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
            Self::Egress => "egress",
            Self::Image => "image",
        }
    }
}

/// A way in which the kernel refuses an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::confinement) enum Refusal {
    /// A system call fails with this error.
    Error(Errno),
    /// The process is killed by this signal.
    Death(Signal),
    /// The system calls succeed without an effect.
    NoEffect,
}

impl Refusal {
    /// Whether an attempt was refused in this way.
    pub(in crate::confinement) fn is(self, stop: &Stop) -> bool {
        match (self, stop) {
            (Self::Error(wanted), Stop::Refused(_, errno)) => wanted == *errno,
            (Self::Death(wanted), Stop::Killed(_, signal)) => wanted == *signal,
            (Self::NoEffect, Stop::Futile(_)) => true,
            _ => false,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Error(errno) => format!("{errno:?}"),
            Self::Death(signal) => signal.to_string(),
            Self::NoEffect => "no effect".to_owned(),
        }
    }
}

/// Rejection by the seccomp filter or by a permission check of the kernel.
pub(in crate::confinement) const USUAL: &[Refusal] = &[
    Refusal::Death(Signal::SIGSYS),
    Refusal::Error(Errno::EACCES),
    Refusal::Error(Errno::EPERM),
];

/// Rejection by the seccomp filter, for attempts that no permission check would reject.
pub(super) const FILTER: &[Refusal] = &[Refusal::Death(Signal::SIGSYS)];

/// A description of the change that an attempt made outside its process; `None` if nothing changed.
pub(in crate::confinement) type Change = io::Result<Option<String>>;

pub(in crate::confinement) struct Attempt {
    /// Unique among all attempts.
    pub(in crate::confinement) name: &'static str,
    pub(in crate::confinement) class: Class,
    /// Consequence if the attempt succeeds.
    pub(in crate::confinement) why: &'static str,
    /// Refusals that pass.
    pub(in crate::confinement) refusals: &'static [Refusal],
    /// Makes the attempt. `Ok` means that it succeeded.
    pub(in crate::confinement) act: fn(&mut Intruder, &Scene) -> Try<()>,
    /// Observes from outside whether the attempt changed anything.
    pub(in crate::confinement) look: fn(&Scene, &Intruder) -> Change,
}

impl Attempt {
    /// The refusals as text.
    pub(in crate::confinement) fn expected(&self) -> String {
        let mut text = String::new();
        for (n, refusal) in self.refusals.iter().enumerate() {
            let between = if n == 0 { "" } else { " or " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{between}{}", refusal.name());
        }
        text
    }
}

/// For an attempt without a visible effect outside: the result of its `act` decides.
pub(super) fn no_change(_: &Scene, _: &Intruder) -> Change {
    Ok(None)
}

/// Turns an error of this suite into a stop that is not a refusal.
pub(super) fn staged<T>(prepared: io::Result<T>) -> Try<T> {
    prepared.map_err(|error| Stop::Broken(error.to_string()))
}

pub(super) fn changed_if(happened: bool, what: &str) -> Change {
    Ok(happened.then(|| what.to_owned()))
}
