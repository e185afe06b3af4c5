//! What a request does to a sandbox in each of its states: a pure function, and the only one.
//!
//! ```text
//!            created                pause, deadline (auto-pause)
//!  (no id) ───────────► Running ───────────────────────────────► Paused(memory | disk)
//!                        │  ▲ │                                   │  │ ▲
//!                        │  │ └─ snapshot, fork ─┐   snapshot ┌───┼──┘ │
//!                        │  │     (it goes on)◄──┘            └►──┼────┘
//!                        │  └─────────────────────────────────────┘ connect, resume, traffic (auto-resume)
//!                        └──────────────┬─────────────────────────┘
//!                              kill, deadline, its VM ended
//!                                       ▼
//!                                     gone
//! ```
//! Each arrow takes time. While one is under way the sandbox is [`Phase::Changing`], and whoever asks for
//! something that needs its end waits and is judged again then. A change that fails leaves the sandbox where it
//! was. There are never two changes of one sandbox under way at once.

use pool::PauseMode;

/// A state in which a sandbox stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Its VM runs and its deadline is armed.
    Running,
    /// It is on disk and has no deadline.
    Paused(PauseMode),
}

/// What is being done with a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is written to disk.
    Pause(PauseMode),
    /// It is brought back.
    Resume,
    /// A snapshot or forks are made of it; it stays what it is.
    Copy,
    /// It is removed.
    End,
}

/// Where a sandbox is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing is under way.
    At(Rest),
    /// Something is.
    Changing {
        /// What.
        change: Change,
        /// Where it was, and where it is again if that fails.
        from: Rest,
    },
}

/// What is asked of a sandbox, by a client, by traffic or by its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// It shall run: connect and resume.
    Connect,
    /// Its deadline or its options shall change, which only a running one has.
    Adjust,
    /// It shall be paused.
    Pause(PauseMode),
    /// A snapshot of it, whatever its state.
    Snapshot,
    /// Forks of it while it runs.
    Fork,
    /// It shall end.
    Kill,
    /// A request for one of its ports.
    Reach,
    /// Its deadline has passed.
    Expire,
}

/// What a sandbox does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Habits {
    /// How it pauses at its deadline; `None`: it ends.
    pub at_deadline: Option<PauseMode>,
    /// Traffic wakes it.
    pub auto_resume: bool,
}

/// What is to be done about an [`Ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is as asked; nothing needs to be started.
    Granted,
    /// Start this change, then answer.
    Start(Change),
    /// A change is under way; ask again when it has ended.
    Wait,
    /// It is ending or, for traffic, not to be woken: for the caller it is not there.
    NotThere,
    /// It is paused already.
    AlreadyPaused,
    /// It is paused, and this needs a running one.
    NotRunning,
}

/// The verdict on an ask.
#[must_use]
pub fn judge(phase: Phase, ask: Ask, habits: Habits) -> Verdict {
    match phase {
        Phase::At(Rest::Running) => judge_running(ask, habits),
        Phase::At(Rest::Paused(mode)) => judge_paused(mode, ask, habits),
        Phase::Changing { change, from } => judge_changing(change, from, ask, habits),
    }
}

fn judge_running(ask: Ask, habits: Habits) -> Verdict {
    match ask {
        Ask::Connect | Ask::Adjust | Ask::Reach => Verdict::Granted,
        Ask::Pause(mode) => Verdict::Start(Change::Pause(mode)),
        Ask::Snapshot | Ask::Fork => Verdict::Start(Change::Copy),
        Ask::Kill => Verdict::Start(Change::End),
        Ask::Expire => match habits.at_deadline {
            Some(mode) => Verdict::Start(Change::Pause(mode)),
            None => Verdict::Start(Change::End),
        },
    }
}

fn judge_paused(mode: PauseMode, ask: Ask, habits: Habits) -> Verdict {
    match ask {
        Ask::Connect => Verdict::Start(Change::Resume),
        Ask::Adjust | Ask::Fork => Verdict::NotRunning,
        Ask::Pause(_) => Verdict::AlreadyPaused,
        Ask::Snapshot => Verdict::Start(Change::Copy),
        Ask::Kill => Verdict::Start(Change::End),
        Ask::Reach if habits.auto_resume && mode == PauseMode::Memory => {
            Verdict::Start(Change::Resume)
        }
        Ask::Reach => Verdict::NotThere,
        // A paused one has no deadline.
        Ask::Expire => Verdict::Granted,
    }
}

fn judge_changing(change: Change, from: Rest, ask: Ask, habits: Habits) -> Verdict {
    match (change, ask) {
        (Change::End, _) => Verdict::NotThere,
        // A snapshot or a fork does not get into the way of those who use the sandbox.
        (Change::Copy, Ask::Reach | Ask::Connect | Ask::Adjust) => match from {
            Rest::Running => Verdict::Granted,
            Rest::Paused(_) => Verdict::Wait,
        },
        (Change::Pause(mode), Ask::Reach) => match mode {
            PauseMode::Memory if habits.auto_resume => Verdict::Wait,
            PauseMode::Memory | PauseMode::FilesystemOnly => Verdict::NotThere,
        },
        (Change::Pause(_) | Change::Resume | Change::Copy, _) => Verdict::Wait,
    }
}

/// How a change ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it was meant.
    Done,
    /// It failed; the sandbox is as before.
    Failed,
    /// The sandbox is gone.
    Gone,
}

/// Where a sandbox is after a change; `None`: nowhere.
#[must_use]
pub fn after(change: Change, from: Rest, outcome: Outcome) -> Option<Rest> {
    match (outcome, change) {
        (Outcome::Gone, _) | (Outcome::Done | Outcome::Failed, Change::End) => None,
        (Outcome::Failed, Change::Pause(_) | Change::Resume | Change::Copy)
        | (Outcome::Done, Change::Copy) => Some(from),
        (Outcome::Done, Change::Pause(mode)) => Some(Rest::Paused(mode)),
        (Outcome::Done, Change::Resume) => Some(Rest::Running),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: Habits = Habits {
        at_deadline: None,
        auto_resume: false,
    };
    const WOKEN: Habits = Habits {
        at_deadline: Some(PauseMode::Memory),
        auto_resume: true,
    };
    const DISK: Rest = Rest::Paused(PauseMode::FilesystemOnly);
    const MEMORY: Rest = Rest::Paused(PauseMode::Memory);

    #[test]
    fn a_deadline_ends_or_pauses() {
        let running = Phase::At(Rest::Running);
        assert_eq!(
            judge(running, Ask::Expire, KILLED),
            Verdict::Start(Change::End)
        );
        assert_eq!(
            judge(running, Ask::Expire, WOKEN),
            Verdict::Start(Change::Pause(PauseMode::Memory))
        );
    }

    #[test]
    fn traffic_wakes_only_what_has_its_memory_and_asked_for_it() {
        let wake = Verdict::Start(Change::Resume);
        assert_eq!(judge(Phase::At(MEMORY), Ask::Reach, WOKEN), wake);
        assert_eq!(
            judge(Phase::At(MEMORY), Ask::Reach, KILLED),
            Verdict::NotThere
        );
        assert_eq!(judge(Phase::At(DISK), Ask::Reach, WOKEN), Verdict::NotThere);
    }

    #[test]
    fn a_second_pause_is_told_so_and_a_killed_one_is_not_there() {
        let pause = Ask::Pause(PauseMode::Memory);
        assert_eq!(
            judge(Phase::At(DISK), pause, KILLED),
            Verdict::AlreadyPaused
        );
        let ending = Phase::Changing {
            change: Change::End,
            from: Rest::Running,
        };
        for ask in [Ask::Kill, Ask::Connect, Ask::Reach, pause] {
            assert_eq!(judge(ending, ask, WOKEN), Verdict::NotThere);
        }
    }

    #[test]
    fn what_is_copied_stays_in_use() {
        let copied = Phase::Changing {
            change: Change::Copy,
            from: Rest::Running,
        };
        for ask in [Ask::Reach, Ask::Connect, Ask::Adjust] {
            assert_eq!(judge(copied, ask, KILLED), Verdict::Granted);
        }
        for ask in [Ask::Kill, Ask::Expire, Ask::Pause(PauseMode::Memory)] {
            assert_eq!(judge(copied, ask, KILLED), Verdict::Wait);
        }
    }
}
