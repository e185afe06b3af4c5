//! The life of a slot, as a pure state machine: events in, the next state and what to do out.
//!
//! ```text
//!  fill ──► Filling ──► Warm ──acquire──► Starting ──► Running ◄──────► Saving
//!                                            ▲          │   ▲
//!  start (no warm slot) ─────────────────────┘     pause│   │
//!                                                       ▼   │
//!                            SavingPaused ◄──► Paused ◄ Stopping ◄── Pausing
//!                                               │           (the VM is on disk and ends)
//!                                               └─resume─► Resuming ──► Running
//!
//!  from each of them: kill, a failed job, the death of the VM ──► Ending ──► nothing
//! ```
//!
//! Beside its stage a slot has up to one job (work on a thread or task that will report back), a VM process or
//! none, and a note that is being written or not. A slot in `Ending` is removed when it has none of the three:
//! then its directory and its control group go. What must never happen: a way from any other stage back to
//! `Warm`, two jobs on a slot, a slot that is removed while something of it is left, or one that stays for ever.

use crate::spec::PauseMode;

/// Where a slot is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// A VM is being made for whoever comes next.
    Filling,
    /// A VM waits, paused, with an identity of its own. Nobody knows its id.
    Warm,
    /// Somebody waits for it.
    Starting,
    /// A caller has its id.
    Running,
    /// It is being written to disk.
    Pausing(PauseMode),
    /// It is on disk, and the VM is on its way out.
    Stopping(PauseMode),
    /// It is on disk only.
    Paused(PauseMode),
    /// A VM is being made from what is on disk.
    Resuming(PauseMode),
    /// A running VM is being copied, and goes on.
    Saving,
    /// What is on disk is being copied.
    SavingPaused(PauseMode),
    /// It is to go.
    Ending,
}

/// What has happened, or is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The fill's job has a VM.
    Filled,
    /// A lease takes a warm slot; its job begins.
    Acquire,
    /// The lease's job on a warm slot is done: the agent knows whose it is.
    Told,
    /// The job of a cold start is done and brings its VM with it.
    Started,
    /// A pause's job begins.
    Pause(PauseMode),
    /// The pause's job is done: everything is on disk.
    Stopped,
    /// The pause's job failed, and the VM goes on.
    Kept,
    /// A resume's job begins.
    Resume,
    /// The resume's job is done and brings its VM with it.
    Resumed,
    /// The resume's job failed and left no VM; what is on disk is untouched.
    StillPaused,
    /// A copy's job begins.
    Save,
    /// The copy's job is done, well or not; the VM goes on.
    Saved,
    /// A job failed in a way that nothing can go on after. A fill or a cold start left no VM.
    Failed,
    /// The VM process is gone.
    Gone,
    /// It is not wanted any more.
    Kill,
    /// Its note is being written.
    NoteBegun,
    /// Its note is written, or cannot be.
    NoteDone,
    /// Its directory and control group are removed.
    Cleaned,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) stage: Stage,
    /// A job will report.
    pub(crate) job: bool,
    /// There is a VM process that has not been reaped.
    pub(crate) vm: bool,
    /// A note is being written.
    pub(crate) note: bool,
    /// The cleaning job runs; only in [`Stage::Ending`].
    pub(crate) cleaning: bool,
}

/// What the driver does after a transition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Effects {
    /// Kill the VM process.
    pub(crate) kill_vm: bool,
    /// Start the cleaning job.
    pub(crate) clean: bool,
    /// Forget the slot: nothing of it is left.
    pub(crate) remove: bool,
}

/// An event that cannot come, or is refused, in this stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wrong;

impl Slot {
    /// A slot whose VM is being made, for a lease that waits or for the next one.
    pub(crate) fn new(stage: Stage) -> Self {
        Self {
            stage,
            job: matches!(stage, Stage::Filling | Stage::Starting),
            vm: false,
            note: false,
            cleaning: false,
        }
    }

    /// A slot that the state directory knew, with a VM that still runs or with everything on disk.
    pub(crate) fn found(stage: Stage) -> Self {
        Self {
            vm: stage == Stage::Running,
            job: false,
            ..Self::new(stage)
        }
    }

    /// Whether it counts as a leased sandbox that callers can name.
    pub(crate) fn is_leased(self) -> bool {
        match self.stage {
            Stage::Filling | Stage::Warm | Stage::Starting | Stage::Ending => false,
            Stage::Running
            | Stage::Pausing(_)
            | Stage::Stopping(_)
            | Stage::Paused(_)
            | Stage::Resuming(_)
            | Stage::Saving
            | Stage::SavingPaused(_) => true,
        }
    }

    /// Whether it is on disk, or may be after the job under way.
    pub(crate) fn is_saved(self) -> bool {
        match self.stage {
            Stage::Pausing(_)
            | Stage::Stopping(_)
            | Stage::Paused(_)
            | Stage::Resuming(_)
            | Stage::SavingPaused(_) => true,
            Stage::Filling
            | Stage::Warm
            | Stage::Starting
            | Stage::Running
            | Stage::Saving
            | Stage::Ending => false,
        }
    }

    /// Whether it has, or is about to have, a VM that needs the host's memory.
    pub(crate) fn takes_memory(self) -> bool {
        match self.stage {
            Stage::Paused(_) | Stage::SavingPaused(_) => false,
            Stage::Ending => self.vm || self.job,
            Stage::Filling
            | Stage::Warm
            | Stage::Starting
            | Stage::Running
            | Stage::Pausing(_)
            | Stage::Stopping(_)
            | Stage::Resuming(_)
            | Stage::Saving => true,
        }
    }
}

/// The one way in which a slot changes.
pub(crate) fn transition(slot: Slot, event: Event) -> Result<(Slot, Effects), Wrong> {
    use Event as E;
    use Stage as S;
    let mut next = slot;
    match (slot.stage, event) {
        (_, E::NoteBegun) if slot.is_leased() && !slot.note => next.note = true,
        (_, E::NoteDone) if slot.note => next.note = false,

        (S::Filling, E::Filled) => next = done(slot, S::Warm, true),
        (S::Warm, E::Acquire) => next = begun(slot, S::Starting),
        (S::Starting, E::Started) if !slot.vm => next = done(slot, S::Running, true),
        (S::Starting, E::Told) if slot.vm => next = done(slot, S::Running, true),
        // It died on the way.
        (S::Starting, E::Told) => next = done(slot, S::Ending, false),
        (S::Running, E::Pause(mode)) => next = begun(slot, S::Pausing(mode)),
        (S::Pausing(mode), E::Stopped) if slot.vm => next = done(slot, S::Stopping(mode), true),
        (S::Pausing(mode), E::Stopped) => next = done(slot, S::Paused(mode), false),
        (S::Pausing(_) | S::Saving, E::Kept | E::Saved) if slot.vm => {
            next = done(slot, S::Running, true);
        }
        (S::Pausing(_) | S::Saving, E::Kept | E::Saved) => next = done(slot, S::Ending, false),
        (S::Stopping(mode), E::Gone) => next = done(slot, S::Paused(mode), false),
        (S::Paused(mode), E::Resume) => next = begun(slot, S::Resuming(mode)),
        (S::Resuming(_), E::Resumed) => next = done(slot, S::Running, true),
        (S::Resuming(mode), E::StillPaused) => next = done(slot, S::Paused(mode), false),
        (S::Running, E::Save) => next = begun(slot, S::Saving),
        (S::Paused(mode), E::Save) => next = begun(slot, S::SavingPaused(mode)),
        (S::SavingPaused(mode), E::Saved) => next = done(slot, S::Paused(mode), false),

        (S::Filling | S::Starting | S::Pausing(_) | S::Saving, E::Failed) => {
            next = done(slot, S::Ending, slot.vm);
        }
        // A job on it will fail by itself, and says so.
        (S::Starting | S::Pausing(_) | S::Saving, E::Gone) if slot.vm => next.vm = false,
        (S::Warm | S::Running, E::Gone) => next = done(slot, S::Ending, false),
        (S::Ending, E::Gone) if slot.vm => next.vm = false,
        // Jobs of a slot that was killed meanwhile. These bring a VM:
        (S::Ending, E::Filled | E::Started | E::Resumed) if slot.job && !slot.vm => {
            next = done(slot, S::Ending, true);
        }
        (S::Ending, E::Told | E::Stopped | E::Kept | E::StillPaused | E::Saved | E::Failed)
            if slot.job =>
        {
            next = done(slot, S::Ending, slot.vm)
        }
        (S::Ending, E::Kill) => {}
        (_, E::Kill) => next.stage = S::Ending,
        (S::Ending, E::Cleaned) if slot.cleaning => {
            next.cleaning = false;
            return Ok((
                next,
                Effects {
                    remove: true,
                    ..Effects::default()
                },
            ));
        }
        _ => return Err(Wrong),
    }
    let ends = next.stage == S::Ending;
    let clean = ends && !next.job && !next.vm && !next.note && !next.cleaning;
    next.cleaning |= clean;
    let kill_vm = next.vm && (ends || matches!(next.stage, S::Stopping(_)));
    check_invariants(next);
    Ok((
        next,
        Effects {
            kill_vm,
            clean,
            remove: false,
        },
    ))
}

/// A job begins.
fn begun(slot: Slot, stage: Stage) -> Slot {
    Slot {
        stage,
        job: true,
        ..slot
    }
}

/// The job is over.
fn done(slot: Slot, stage: Stage, vm: bool) -> Slot {
    Slot {
        stage,
        job: false,
        vm,
        ..slot
    }
}

/// What holds between any two events.
///
/// # Panics
/// In debug builds, if it does not.
pub(crate) fn check_invariants(slot: Slot) {
    use Stage as S;
    let Slot {
        stage,
        job,
        vm,
        note,
        cleaning,
    } = slot;
    let fits = match stage {
        S::Filling | S::Resuming(_) | S::SavingPaused(_) => job && !vm,
        // A job's VM may die under it.
        S::Starting | S::Pausing(_) | S::Saving => job,
        S::Warm | S::Running | S::Stopping(_) => vm && !job,
        S::Paused(_) => !vm && !job,
        S::Ending => !cleaning || !(job || vm || note),
    };
    debug_assert!(fits, "impossible slot: {slot:?}");
    debug_assert!(!cleaning || stage == S::Ending, "impossible slot: {slot:?}");
    debug_assert!(
        stage != S::Ending || job || vm || note || cleaning,
        "a slot that nothing will end: {slot:?}"
    );
    debug_assert!(
        !note || slot.is_leased() || stage == S::Ending,
        "a note of nobody: {slot:?}"
    );
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the world may do next to a slot: jobs end only while one runs, VMs die only while there is one.
    fn possible(slot: Slot) -> Vec<Event> {
        use Event as E;
        use Stage as S;
        let mut events = vec![E::Kill];
        if slot.vm {
            events.push(E::Gone);
        }
        if slot.note {
            events.push(E::NoteDone);
        } else if slot.is_leased() {
            events.push(E::NoteBegun);
        }
        if slot.cleaning {
            events.push(E::Cleaned);
        }
        events.extend(match slot.stage {
            S::Filling => vec![E::Filled, E::Failed],
            S::Warm => vec![E::Acquire],
            S::Running => vec![
                E::Pause(PauseMode::Memory),
                E::Pause(PauseMode::FilesystemOnly),
                E::Save,
            ],
            S::Pausing(_) => vec![E::Stopped, E::Kept, E::Failed],
            S::Paused(_) => vec![E::Resume, E::Save],
            S::Resuming(_) => vec![E::Resumed, E::StillPaused],
            S::Saving => vec![E::Saved, E::Failed],
            S::SavingPaused(_) => vec![E::Saved],
            S::Starting | S::Stopping(_) | S::Ending => Vec::new(),
        });
        events
    }

    /// The events that end a job which was begun in this stage.
    fn ends_of(stage: Stage, had_vm: bool) -> Vec<Event> {
        use Event as E;
        use Stage as S;
        match stage {
            S::Filling => vec![E::Filled, E::Failed],
            S::Starting if had_vm => vec![E::Told, E::Failed],
            S::Starting => vec![E::Started, E::Failed],
            S::Pausing(_) => vec![E::Stopped, E::Kept, E::Failed],
            S::Resuming(_) => vec![E::Resumed, E::StillPaused],
            S::Saving => vec![E::Saved, E::Failed],
            S::SavingPaused(_) => vec![E::Saved],
            S::Warm | S::Running | S::Stopping(_) | S::Paused(_) | S::Ending => Vec::new(),
        }
    }

    /// A slot in a world of its own: the model knows what really exists.
    struct World {
        slot: Slot,
        /// Ends that the running job may have.
        job: Vec<Event>,
        vm: bool,
        dir: bool,
        ever_leased: bool,
    }

    impl World {
        fn apply(&mut self, event: Event) -> bool {
            let Ok((next, effects)) = transition(self.slot, event) else {
                panic!("{:?} refuses {event:?}", self.slot);
            };
            let begins = next.job && !self.slot.job;
            if begins {
                self.job = ends_of(next.stage, self.slot.vm);
            }
            match event {
                Event::Filled | Event::Started | Event::Resumed => self.vm = true,
                Event::Gone => self.vm = false,
                Event::Cleaned => self.dir = false,
                _ => {}
            }
            if !next.job {
                self.job.clear();
            }
            assert_eq!(self.vm, next.vm, "{:?} {event:?} {next:?}", self.slot);
            assert!(!effects.clean || (!self.vm && self.job.is_empty()));
            if effects.remove {
                assert!(!self.vm && self.job.is_empty() && !self.dir);
            }
            // A slot serves one lease.
            self.ever_leased |= next.stage == Stage::Starting;
            assert!(!(self.ever_leased && next.stage == Stage::Warm));
            // Whatever has a VM and shall not have one loses it.
            let unwanted = matches!(next.stage, Stage::Ending | Stage::Stopping(_));
            assert!(!(unwanted && next.vm) || effects.kill_vm);
            self.slot = next;
            effects.remove
        }

        fn choices(&self) -> Vec<Event> {
            let mut events: Vec<_> = possible(self.slot)
                .into_iter()
                .filter(|e| !is_job_end(*e))
                .collect();
            events.extend(&self.job);
            events
        }
    }

    fn is_job_end(event: Event) -> bool {
        use Event as E;
        matches!(
            event,
            E::Filled
                | E::Told
                | E::Started
                | E::Stopped
                | E::Kept
                | E::Resumed
                | E::StillPaused
                | E::Saved
                | E::Failed
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn whatever_happens_nothing_is_left(
            cold: bool,
            picks in proptest::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let stage = if cold { Stage::Starting } else { Stage::Filling };
            let mut world = World {
                slot: Slot::new(stage),
                job: ends_of(stage, false),
                vm: false,
                dir: true,
                ever_leased: cold,
            };
            for pick in picks {
                let choices = world.choices();
                if world.apply(*pick.get(&choices)) {
                    return Ok(());
                }
            }
            // From anywhere a kill ends it, in few steps, however the open ends come in.
            if world.apply(Event::Kill) {
                return Ok(());
            }
            for _ in 0..8 {
                let next = world
                    .choices()
                    .into_iter()
                    .find(|e| !matches!(e, Event::Kill));
                match next {
                    Some(event) => {
                        if world.apply(event) {
                            return Ok(());
                        }
                    }
                    None => break,
                }
            }
            prop_assert!(false, "a slot stays for ever: {:?}", world.slot);
        }
    }

    #[test]
    fn what_a_stage_does_not_have_is_refused() {
        let warm = transition(Slot::new(Stage::Filling), Event::Filled)
            .unwrap()
            .0;
        for event in [
            Event::Pause(PauseMode::Memory),
            Event::Resume,
            Event::Save,
            Event::Filled,
            Event::NoteBegun,
        ] {
            assert_eq!(transition(warm, event), Err(Wrong), "{event:?}");
        }
        let paused = Slot::found(Stage::Paused(PauseMode::Memory));
        assert!(transition(paused, Event::Pause(PauseMode::Memory)).is_err());
        assert!(transition(paused, Event::Acquire).is_err());
    }
}
