//! State that all requests share.

use std::{collections::BTreeMap, os::fd::OwnedFd};

use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use transport::{Key, Reactor, ServerError, Slots};

use super::{
    freeze::Freezer,
    metrics::Meter,
    process::{child::Process, events::PIECE},
    watch::watcher::Watcher,
};
use crate::{
    identity::Duties,
    sys::{self, Spawner},
    users::UserDb,
};

/// A connection of this server.
pub(crate) type Conn = transport::Conn<Core>;
/// The connections of this server.
pub(crate) type Conns = transport::Conns<Core>;

/// State that all requests share.
pub(crate) struct Core {
    pub(crate) io: Reactor,
    pub(crate) signals: SignalFd,
    /// Running processes, and ended ones until they are forgotten.
    pub(crate) processes: Slots<Process>,
    pub(crate) watchers: Slots<Watcher>,
    pub(crate) users: UserDb,
    pub(crate) spawner: Spawner,
    pub(crate) settings: Settings,
    pub(crate) duties: Duties,
    /// `/dev/null`, opened when the first process without standard input starts.
    pub(crate) null: Option<OwnedFd>,
    pub(crate) meter: Meter,
    pub(crate) freezer: Option<Freezer>,
    /// SIGTERM or SIGINT was received.
    pub(crate) ending: bool,
}

/// Settings of `/init`.
#[derive(Default)]
pub(crate) struct Settings {
    /// Whether `/init` has succeeded.
    pub(crate) initialised: bool,
    /// Empty if no token is required.
    pub(crate) access_token: String,
    pub(crate) env_vars: BTreeMap<String, String>,
    pub(crate) default_user: String,
    /// Empty for the user's home directory.
    pub(crate) default_workdir: String,
}

/// Descriptors that belong to no connection, as numbers of [`transport::Token::Service`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Source {
    Signals,
    Stdin,
    /// Index 0 of [`Process::outputs`]: standard output or the terminal.
    Stdout,
    /// Index 1 of [`Process::outputs`]: standard error.
    Stderr,
    Watch,
}

impl Source {
    pub(crate) fn token(self, key: Key) -> transport::Token {
        transport::Token::Service(self as u8, key)
    }

    /// The source with that number.
    pub(crate) fn find(number: u8) -> Option<Self> {
        let all = [
            Self::Signals,
            Self::Stdin,
            Self::Stdout,
            Self::Stderr,
            Self::Watch,
        ];
        all.get(usize::from(number)).copied()
    }
}

/// Work that belongs to no connection, as numbers of [`transport::Work::Service`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Job {
    Process,
    Watch,
}

impl Core {
    /// Creates the state. Also blocks the signals that the server reads from a descriptor, adopts orphans, and raises
    /// the limit on descriptors.
    pub(crate) fn new(duties: Duties) -> Result<Self, ServerError> {
        let cannot = ServerError::cannot;
        let mut mask = SigSet::empty();
        for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT] {
            mask.add(signal);
        }
        mask.thread_block().map_err(cannot("block signals"))?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&mask, flags).map_err(cannot("watch signals"))?;
        let io = Reactor::new(PIECE).map_err(cannot("create a poller"))?;
        let token = Source::Signals.token(Key::default());
        io.watch(&signals, token, nix::sys::epoll::EpollFlags::EPOLLIN)
            .map_err(cannot("poll signals"))?;
        sys::adopt_orphans().map_err(cannot("adopt orphans"))?;
        let mut users = UserDb::system();
        let default_user = match &duties {
            Duties::Machine(_) => "user".to_owned(),
            Duties::None => users.name_of(nix::unistd::geteuid().as_raw()),
        };
        Ok(Self {
            io,
            signals,
            processes: Slots::new(),
            watchers: Slots::new(),
            users,
            spawner: Spawner::new(raise_file_limit()),
            settings: Settings {
                default_user,
                ..Settings::default()
            },
            duties,
            null: None,
            meter: Meter::default(),
            freezer: None,
            ending: false,
        })
    }

    /// Variables of all processes: those that name the authority of `/init`, overridden by those of the sandbox.
    pub(crate) fn environment(&self) -> BTreeMap<String, String> {
        let mut all: BTreeMap<_, _> = self.duties.variables().into_iter().collect();
        all.extend(self.settings.env_vars.clone());
        all
    }

    /// Queues work for the next turn.
    pub(crate) fn enqueue(&mut self, job: Job, key: Key) {
        self.io.enqueue(transport::Work::Service(job as u8, key));
    }
}

/// The hard limit on descriptors that the server, as root, sets for itself and its processes, unless the current one is
/// higher.
const FILES: u64 = 1 << 19;

/// Raises the limit of descriptors to the maximum. Returns the soft and hard limit for processes: the previous soft
/// limit, and the new maximum.
fn raise_file_limit() -> (u64, u64) {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    let most = hard.max(FILES);
    // Only root may raise the hard limit.
    match setrlimit(Resource::RLIMIT_NOFILE, most, most) {
        Ok(()) => (soft, most),
        Err(_) => {
            // On failure fewer connections fit.
            let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
            (soft, hard)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_survive_the_poller() {
        for source in [
            Source::Signals,
            Source::Stdin,
            Source::Stdout,
            Source::Stderr,
            Source::Watch,
        ] {
            assert_eq!(Source::find(source as u8), Some(source));
        }
        assert_eq!(Source::find(5), None);
    }
}
