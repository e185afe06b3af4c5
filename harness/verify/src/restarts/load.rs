//! The load: clients that work continuously, each with its own connections, and record their observations.

mod files;
mod lives;
mod requests;
mod streams;

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread::{self, Scope},
    time::Duration,
};

use stats::random::SplitMix64;
use testbed::api::Api;

use super::{
    event::{Cause, Event, Fate, Record, Seen, Work},
    guests::{Guest, Guests},
    line::Trouble,
};

/// Pause of a client after a failure.
const BACKOFF: Duration = Duration::from_millis(10);

/// State shared by all clients.
#[derive(Debug)]
pub(super) struct Site<'a> {
    pub(super) api: &'a Api,
    pub(super) template: &'a str,
    pub(super) guests: &'a Guests,
    pub(super) stop: &'a AtomicBool,
    pub(super) log: Sender<Record>,
}

/// A failed step of a client.
#[derive(Debug)]
enum Fault {
    /// The request failed.
    Trouble(Trouble),
    /// The response looks successful but is wrong.
    Wrong(String),
}

impl<T: Into<Trouble>> From<T> for Fault {
    fn from(trouble: T) -> Self {
        Self::Trouble(trouble.into())
    }
}

impl Fault {
    /// As the outcome of a request.
    fn seen(self) -> Seen {
        match self {
            Self::Trouble(trouble) => trouble.failed(),
            Self::Wrong(what) => Seen::Wrong(what),
        }
    }

    /// As the outcome of a transfer, which counts as established unless the server refused it.
    fn of_transfer(self) -> Seen {
        match self {
            Self::Trouble(trouble)
                if matches!(
                    trouble.cause,
                    Cause::Refused | Cause::Status | Cause::NotFound
                ) =>
            {
                trouble.failed()
            }
            fault => fault.cut(),
        }
    }

    /// As the end of an established stream.
    fn cut(self) -> Seen {
        match self {
            Self::Trouble(trouble) => trouble.cut(),
            Self::Wrong(what) => Seen::Wrong(what),
        }
    }
}

/// Starts all clients. They end after `stop` has been set.
pub(super) fn start<'scope>(scope: &'scope Scope<'scope, '_>, site: &'scope Site<'_>, seed: u64) {
    const CLIENTS: [fn(&Site<'_>, SplitMix64); 13] = [
        requests::look_up,
        requests::list,
        requests::command,
        requests::command,
        requests::command_kept,
        streams::endless_counter,
        streams::ending_counter,
        streams::terminal,
        streams::watch,
        files::upload,
        files::download,
        lives::births,
        lives::naps,
    ];
    for (client, n) in CLIENTS.into_iter().zip(1_u64..) {
        let random = SplitMix64::new(seed.wrapping_mul(1000).wrapping_add(n));
        scope.spawn(move || client(site, random));
    }
}

impl Site<'_> {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn guest(&self, random: &mut SplitMix64) -> Option<&Guest> {
        self.guests.pick(random.next_u64())
    }

    /// Records an event that began at `began_ns` and ends now.
    fn record(&self, work: Work, began_ns: u64, seen: Seen) {
        let failed = seen != Seen::Done;
        // The receiver lives until all clients have ended.
        let _ = self
            .log
            .send(Record::Event(Event::now(work, began_ns, seen)));
        if failed {
            thread::sleep(BACKOFF);
        }
    }

    pub(super) fn fate(&self, id: &str, fate: Fate) {
        let id = id.to_owned();
        let _ = self.log.send(Record::Fate { id, fate });
    }

    /// Waits, but not for longer than the load lasts.
    fn pause(&self, duration: Duration) {
        if self.goes_on() {
            thread::sleep(duration);
        }
    }
}
