//! Adopts the sandboxes of the previous server: their order, and how many are verified at the same time.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use model::SandboxId;

use crate::leftovers::Leftovers;

/// A job that takes longer than this waits for an unresponsive VMM. Another job then begins, so that such VMMs do not
/// delay other adoptions.
const PROMPT: Duration = Duration::from_millis(100);
/// Maximum number of jobs, each of which holds a thread.
const MAX_JOBS: usize = 256;

/// Priority of a sandbox in the order of adoptions, highest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// The sandbox was killed. Its job ends without having begun and takes no place.
    Killed,
    /// A request waits for the sandbox.
    Requested,
    Any,
}

/// Position of a sandbox in the order of adoptions: its rank, and a number that increases with each change of rank.
type Turn = (Rank, u64);

#[derive(Debug)]
pub(super) struct Adoptions {
    pending: BTreeMap<Turn, SandboxId>,
    turns: HashMap<SandboxId, Turn>,
    next_number: u64,
    /// Start time of each job under way, in CLOCK_MONOTONIC nanoseconds.
    begun: HashMap<SandboxId, u64>,
    /// Jobs that only wait for a VMM to respond.
    asking: HashSet<SandboxId>,
    /// Maximum number of jobs that have just begun.
    parallel: usize,
    /// Set until the sweep begins.
    leftovers: Option<Leftovers>,
    is_sweeping: bool,
    /// No further job begins: the next server adopts the rest.
    is_stopped: bool,
}

impl Adoptions {
    pub(super) fn new(pending: Vec<SandboxId>, leftovers: Leftovers, parallel: usize) -> Self {
        let mut adoptions = Self {
            pending: BTreeMap::new(),
            turns: HashMap::new(),
            next_number: 0,
            begun: HashMap::new(),
            asking: HashSet::new(),
            parallel,
            leftovers: Some(leftovers),
            is_sweeping: false,
            is_stopped: false,
        };
        for id in pending {
            adoptions.enter(id, Rank::Any);
        }
        adoptions
    }

    fn enter(&mut self, id: SandboxId, rank: Rank) {
        let turn = (rank, self.next_number);
        self.next_number += 1;
        self.pending.insert(turn, id.clone());
        self.turns.insert(id, turn);
    }

    /// Raises the rank of a sandbox whose adoption has not begun.
    fn advance(&mut self, id: &SandboxId, rank: Rank) {
        if self.turns.get(id).is_some_and(|turn| rank < turn.0)
            && let Some(id) = self.leave(id)
        {
            self.enter(id, rank);
        }
    }

    fn leave(&mut self, id: &SandboxId) -> Option<SandboxId> {
        let turn = self.turns.remove(id)?;
        self.pending.remove(&turn)
    }

    /// Records that a request waits for this sandbox.
    pub(super) fn requested(&mut self, id: &SandboxId) {
        self.advance(id, Rank::Requested);
    }

    /// Records that this sandbox was killed.
    pub(super) fn killed(&mut self, id: &SandboxId) {
        self.advance(id, Rank::Killed);
    }

    /// Takes the sandbox to adopt next: first killed ones, then the one that a request has waited for longest, then any
    /// other. `None` if none is left or none may begin now.
    pub(super) fn next(&mut self, now_ns: u64) -> Option<SandboxId> {
        if self.is_stopped {
            return None;
        }
        let (&(rank, _), id) = self.pending.first_key_value()?;
        let id = id.clone();
        let may_begin = || self.begun.len() < MAX_JOBS && self.prompt(now_ns) < self.parallel;
        if rank != Rank::Killed && !may_begin() {
            return None;
        }
        self.leave(&id)
    }

    /// Number of jobs that have just begun.
    fn prompt(&self, now_ns: u64) -> usize {
        let is_prompt =
            |since: &&u64| u128::from(now_ns.saturating_sub(**since)) < PROMPT.as_nanos();
        self.begun.values().filter(is_prompt).count()
    }

    /// Whether a sandbox is being adopted whose VMM is not known to be unresponsive. Background work then yields.
    pub(super) fn is_urgent(&self, now_ns: u64) -> bool {
        !self.pending.is_empty() || self.prompt(now_ns) > 0
    }

    /// Whether the previous server's leftovers have been removed.
    pub(super) fn is_swept(&self) -> bool {
        self.leftovers.is_none() && !self.is_sweeping
    }

    pub(super) fn is_sweeping(&self) -> bool {
        self.is_sweeping
    }

    /// Begins no further adoption: the rest is left to the next server.
    pub(super) fn stop(&mut self) {
        self.is_stopped = true;
        self.leftovers = None;
    }

    /// Whether no job can change anything. A job that waits for a VMM may overlap with the next server.
    pub(super) fn is_idle(&self) -> bool {
        self.begun.keys().all(|id| self.asking.contains(id))
    }

    /// Whether the adoption of this sandbox has not begun.
    pub(super) fn is_pending(&self, id: &SandboxId) -> bool {
        self.turns.contains_key(id)
    }

    pub(super) fn asks(&mut self, id: &SandboxId) {
        self.asking.insert(id.clone());
    }

    /// How long the driver may sleep.
    pub(super) fn timer(&self) -> Option<Duration> {
        (!self.pending.is_empty() || self.leftovers.is_some()).then_some(PROMPT)
    }

    pub(super) fn begun(&mut self, id: SandboxId, now_ns: u64) {
        self.begun.insert(id, now_ns);
    }

    /// The leftovers to remove, once no adoption is urgent. [`Adoptions::swept`] must follow.
    pub(super) fn take_leftovers(&mut self, now_ns: u64) -> Option<Leftovers> {
        if self.is_urgent(now_ns) {
            return None;
        }
        let leftovers = self.leftovers.take()?;
        self.is_sweeping = true;
        Some(leftovers)
    }

    pub(super) fn ended(&mut self, id: &SandboxId) {
        self.begun.remove(id);
        self.asking.remove(id);
    }

    pub(super) fn swept(&mut self) {
        self.is_sweeping = false;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(number: u8) -> SandboxId {
        SandboxId::from_random([number; 19])
    }

    fn adoptions(count: u8, parallel: usize) -> Adoptions {
        Adoptions::new((0..count).map(id).collect(), Leftovers::default(), parallel)
    }

    #[test]
    fn requested_sandboxes_are_adopted_first_and_killed_ones_need_no_place() {
        let mut adoptions = adoptions(6, 1);
        for number in [4, 2, 4, 5] {
            adoptions.requested(&id(number));
        }
        assert_eq!(adoptions.next(0), Some(id(4)));
        adoptions.begun.insert(id(4), 0);
        assert_eq!(adoptions.next(0), None, "a job has just begun");
        adoptions.killed(&id(5));
        adoptions.killed(&id(0));
        adoptions.requested(&id(5));
        assert_eq!(adoptions.next(0), Some(id(5)));
        assert_eq!(adoptions.next(0), Some(id(0)));
        assert_eq!(adoptions.next(0), None);
        // The job waits for an unresponsive VMM.
        let later = u64::try_from(PROMPT.as_nanos()).unwrap();
        let order: Vec<_> = std::iter::from_fn(|| adoptions.next(later)).collect();
        assert_eq!(order, [id(2), id(1), id(3)]);
        // Their adoption has begun, so they have left the queue.
        adoptions.requested(&id(2));
        adoptions.killed(&id(4));
        assert_eq!(adoptions.next(later), None);
        assert!(!adoptions.is_urgent(later));
    }

    /// A reference implementation of the order: smallest rank first, then the earliest change of rank.
    #[derive(Default)]
    struct Model(Vec<(Rank, SandboxId)>);

    impl Model {
        fn advance(&mut self, id: &SandboxId, rank: Rank) {
            let found = self.0.iter().position(|(r, i)| i == id && rank < *r);
            if let Some(at) = found {
                self.0.remove(at);
                self.0.push((rank, id.clone()));
            }
        }

        fn next(&mut self) -> Option<SandboxId> {
            let first = self.0.iter().map(|(rank, _)| *rank).min()?;
            let at = self.0.iter().position(|(rank, _)| *rank == first)?;
            Some(self.0.remove(at).1)
        }
    }

    proptest! {
        #[test]
        fn adoptions_have_the_order_of_a_model(steps in prop::collection::vec((0..3u8, 0..20u8), 0..80)) {
            let mut adoptions = adoptions(20, usize::MAX);
            let mut model = Model((0..20).map(|n| (Rank::Any, id(n))).collect());
            for (what, number) in steps {
                let id = id(number);
                match what {
                    0 => {
                        adoptions.requested(&id);
                        model.advance(&id, Rank::Requested);
                    }
                    1 => {
                        adoptions.killed(&id);
                        model.advance(&id, Rank::Killed);
                    }
                    _ => prop_assert_eq!(adoptions.next(0), model.next()),
                }
                prop_assert_eq!(adoptions.pending.len(), model.0.len());
                prop_assert_eq!(adoptions.turns.len(), model.0.len());
            }
        }
    }
}
