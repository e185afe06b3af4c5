//! The model of one sandbox: possible responses to each action, and the resulting states.

use super::{
    plan::{Action, AtDeadline, Keep, Place},
    site::{Reply, Seen},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Life {
    Running,
    Paused(Keep),
    Ended,
}

/// The state of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct State {
    pub(super) life: Life,
    pub(super) disk: u32,
    pub(super) memory: u32,
    /// Whether the deadline is the one of [`Action::Expire`].
    pub(super) is_due: bool,
}

impl State {
    /// A new sandbox of the template.
    pub(super) const NEW: Self = Self {
        life: Life::Running,
        disk: 0,
        memory: 0,
        is_due: false,
    };

    /// A new sandbox that continues from this state.
    pub(super) fn copied(self) -> Self {
        Self {
            life: Life::Running,
            is_due: false,
            ..self
        }
    }

    fn with(self, life: Life) -> Self {
        Self {
            life,
            is_due: false,
            ..self
        }
    }

    fn written(mut self, place: Place, value: u32) -> Self {
        match place {
            Place::Disk => self.disk = value,
            Place::Memory => self.memory = value,
        }
        self
    }

    fn value(self, place: Place) -> u32 {
        match place {
            Place::Disk => self.disk,
            Place::Memory => self.memory,
        }
    }

    fn resumed(self, kept: Keep) -> Self {
        let memory = match kept {
            Keep::All => self.memory,
            Keep::Disk => 0,
        };
        Self {
            memory,
            ..self.with(Life::Running)
        }
    }
}

/// The response to an action in this state, and the resulting state.
pub(super) fn perform(state: State, action: Action, at_deadline: AtDeadline) -> (Reply, State) {
    use Action as A;
    use Life as L;
    match (state.life, action) {
        (L::Running, A::Exec) => (Reply::Done, state),
        (L::Running, A::Write(place, value)) => (Reply::Done, state.written(place, value)),
        (L::Running, A::Read(place)) => (Reply::Value(state.value(place)), state),
        (L::Running, A::Pause(keep)) => (Reply::Done, state.with(L::Paused(keep))),
        (L::Running, A::Connect) => (Reply::WasRunning, state.with(L::Running)),
        (L::Running, A::Resume) => (Reply::Conflict, state),
        (L::Running, A::Snapshot(_) | A::Fork(_)) => (Reply::Done, state),
        (L::Running, A::Extend) => (Reply::Done, state.with(L::Running)),
        (L::Running, A::Expire) => (
            Reply::Done,
            State {
                is_due: true,
                ..state
            },
        ),
        (L::Running, A::Deadline) if state.is_due => {
            let life = match at_deadline {
                AtDeadline::End => L::Ended,
                AtDeadline::Pause => L::Paused(Keep::All),
            };
            (Reply::Done, state.with(life))
        }
        (L::Running, A::KillVmm) => (Reply::Done, state.with(L::Ended)),
        (_, A::Deadline | A::KillVmm) => (Reply::Done, state),

        (L::Running | L::Paused(_), A::Kill) => (Reply::Done, state.with(L::Ended)),
        (L::Paused(kept), A::Connect | A::Resume) => (Reply::Resumed, state.resumed(kept)),
        (L::Paused(_), A::Pause(_)) => (Reply::Conflict, state),
        (L::Paused(Keep::All), A::Snapshot(_)) => (Reply::Done, state),
        (L::Paused(Keep::Disk), A::Snapshot(_)) => (Reply::Conflict, state),

        (L::Running, A::Look) => (Reply::State(Seen::Running), state),
        (L::Paused(_), A::Look) => (Reply::State(Seen::Paused), state),
        (L::Ended, A::Look) => (Reply::State(Seen::Absent), state),
        (L::Paused(_) | L::Ended, _) => (Reply::NotFound, state),
    }
}
