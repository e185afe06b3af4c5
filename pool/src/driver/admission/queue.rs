//! The queue of requests that wait for a start: creates, forks and resumes.

use std::{collections::VecDeque, sync::Arc};

use model::SandboxId;

use crate::driver::slots::Slots;
use crate::{
    answer::Answer,
    message::Unclaimed,
    policy::{Places, StartFor},
    sandbox::{CreateSpec, Priority},
    slot::Stage,
    work::save::ForkSnapshot,
};

#[derive(Debug)]
pub(in crate::driver) struct Pending {
    pub(in crate::driver) want: Want,
    /// Time of the call, in CLOCK_MONOTONIC nanoseconds.
    pub(in crate::driver) accepted_ns: u64,
    /// It waits for room.
    pub(in crate::driver) awaits_room: bool,
}

#[derive(Debug)]
pub(in crate::driver) enum Want {
    New {
        spec: Box<CreateSpec>,
        /// Id of the template. For a fork, the id of the source's template.
        template: String,
        fork: Option<Arc<ForkSnapshot>>,
        answer: Answer<Unclaimed>,
    },
    /// The sandbox is in [`Stage::ResumeQueued`], and its entry has the request.
    Resume(SandboxId, StartFor),
}

impl Pending {
    pub(in crate::driver) fn start_for(&self) -> StartFor {
        match &self.want {
            Want::New { spec, .. } if spec.priority == Priority::Background => StartFor::Build,
            Want::New { .. } => StartFor::Create,
            Want::Resume(_, start_for) => *start_for,
        }
    }
}

#[derive(Debug)]
pub(in crate::driver) struct Queue {
    /// Requests in order of arrival. Requests that can be served overtake those that cannot.
    pending: VecDeque<Pending>,
    /// Maximum number of concurrent starts.
    places: u32,
}

impl Queue {
    pub(in crate::driver) fn new(cores: u32) -> Self {
        Self {
            pending: VecDeque::new(),
            places: cores.saturating_mul(2),
        }
    }

    pub(in crate::driver) fn push(&mut self, want: Want, accepted_ns: u64) {
        self.pending.push_back(Pending {
            want,
            accepted_ns,
            awaits_room: false,
        });
    }

    /// Puts back a request that must keep waiting.
    pub(in crate::driver) fn put_back(&mut self, pending: Pending) {
        self.pending.push_back(pending);
    }

    pub(in crate::driver) fn take_all(&mut self) -> VecDeque<Pending> {
        std::mem::take(&mut self.pending)
    }

    pub(in crate::driver) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Number of requests that wait for room.
    pub(in crate::driver) fn awaiting_room(&self) -> usize {
        self.pending.iter().filter(|p| p.awaits_room).count()
    }

    /// Whether a request waits that does not come from a build.
    pub(in crate::driver) fn has_callers(&self) -> bool {
        let mut pending = self.pending.iter();
        pending.any(|pending| pending.start_for() != StartFor::Build)
    }

    /// The places for starts, with the ones that starts under way hold.
    pub(in crate::driver) fn places(&self, slots: &Slots) -> Places {
        let mut places = Places {
            all: self.places,
            ..Places::default()
        };
        for entry in slots.values() {
            let is_start = matches!(entry.slot.stage, Stage::Starting | Stage::Resuming(_));
            // A lease holds no place, because a warm slot has its VM already.
            if is_start && !entry.slot.vm {
                places.hold(entry.start_for);
            }
        }
        places
    }
}
